"""What :class:`~gpuworker.CudaWorker` does in the arbiter: give every worker its seat before the fork.

An exception that left this module would end the server, so none does. At the first start a problem stops the server the
way gunicorn itself does it (``HaltServer``: listeners closed, pid file and socket removed, exit code 1). Later it goes
into the seat, and the worker reports it from its own process while the others serve on.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from gunicorn.errors import HaltServer

from gpuworker import process
from gpuworker.arbiter import adoption, deaths, preload
from gpuworker.arbiter.adoption import Inheritance
from gpuworker.arbiter.devices import Device, DeviceError, Devices, discover
from gpuworker.arbiter.guard import guard
from gpuworker.arbiter.manager import ServiceManager, StoreKey
from gpuworker.arbiter.preload import Preloaded, PreloadError
from gpuworker.arbiter.slots import SlotTable
from gpuworker.settings import SettingError, Settings
from gpuworker.status.scoreboard import Row, Scoreboard
from gpuworker.weights.locks import Locks
from gpuworker.weights.store import Store

#: Seconds in which gunicorn closes up after a problem at the first start, and says what it was.
HALT_GRACE = 10.0


@dataclass(frozen=True)
class Generation:
    """The workers started with one gunicorn ``Config`` object: HUP makes a new one.

    :param number: counted from 1.
    :param problem: why its settings or devices cannot be used; empty if they can.
    """

    number: int
    settings: Settings = field(default_factory=Settings)
    devices: Devices | None = None
    problem: str = ""


@dataclass(frozen=True)
class Seat:
    """What the arbiter hands to one worker.

    :param device: None only where there is a problem; so are `store`, of the device's shared objects, and `locks`.
    :param preloaded: what an app that the arbiter imported put on the GPU.
    :param problem: why the worker must not serve; empty if it may.
    """

    slot: int
    row: Row
    board: Scoreboard
    generation: Generation
    device: Device | None = None
    store: Store | None = None
    locks: Locks | None = None
    preloaded: Preloaded | None = None
    problem: str = ""


class Arbiter:
    """The state of this package in gunicorn's arbiter process.

    :param app_is_here: whether the arbiter imported the app (``--preload``).
    :raises PreloadError: if that app cannot be handed to the workers.
    """

    def __init__(self, *, app_is_here: bool) -> None:
        self._preloaded = preload.finish(app_is_here=app_is_here)
        self._board = Scoreboard()
        self._slots = SlotTable(self._board)
        self._locks = Locks()
        self._stores: dict[StoreKey, Store] = {}
        self._ooms = deaths.count_oom_kills()
        self._cfg: object = None
        self._generation = Generation(0)
        _mark_stop_signals(self._board)

    def seat(self, worker: Any) -> Seat:
        """A seat for `worker`, whatever happens."""
        row, problem, device, store = Row(), "", None, None
        if worker.cfg is not self._cfg:
            self._cfg = worker.cfg
            self._start_generation(worker.log)
            self._settle_stores(worker)
        try:
            self._explain_deaths(worker.log)
            row = self._slots.take(worker, self._generation.number)
            problem = self._generation.problem or guard.driver_problem()
            if self._generation.devices:
                device = self._generation.devices.of_slot(row.slot)
                store = self._store_of(device)
            self._keep_stores(worker.log)
        except Exception as error:
            problem = _unexpected(worker.log, error)
        # Not before it has a row: a generation without any is one that failed.
        self._board.newest_generation = self._generation.number
        return Seat(row.slot, row, self._board, self._generation, device, store, self._locks, self._preloaded, problem)

    def _explain_deaths(self, log: Any) -> None:
        """What can be told of workers that died since the last one was forked."""
        for _, row in self._slots.forget_reaped():
            ooms, self._ooms = self._ooms, deaths.count_oom_kills()
            if self._ooms > ooms:
                message = "The kernel has killed %d process(es) of this server for lack of memory; slot %d has died"
                log.error(message, self._ooms - ooms, row.slot)

    def _store_of(self, device: Device) -> Store:
        # One for each device, and the same for all generations: weights may outlive a HUP.
        key = (device.uuid or device.token or "cpu", device.index if device.is_cpu else 0)
        if key not in self._stores:
            self._stores[key] = _inheritance.pop(key)
        return self._stores[key]

    def _settle_stores(self, worker: Any) -> None:
        """Take what the server before has left for the devices that the workers will use, and nothing else."""
        try:
            adoption.follow(worker.cfg, self._stores, _manager)
            if self._generation.devices:
                for slot in range(worker.cfg.workers):
                    self._store_of(self._generation.devices.of_slot(slot))
                _inheritance.close(worker.log)
        except Exception as error:
            _unexpected(worker.log, error)

    def _keep_stores(self, log: Any) -> None:
        if self._generation.devices is None:
            return  # After a HUP with settings that cannot be read: what was kept stays so.
        if os.environ.get("GUNICORN_PID") == str(os.getppid()):
            return  # Started by USR2, and the service is still the other's. gunicorn drops the variable when that ends.
        _manager.keep(self._stores if self._generation.settings.fdstore else {}, os.environ, log)

    def _start_generation(self, log: Any) -> None:
        number = self._generation.number + 1
        try:
            settings = Settings.from_environ(os.environ)
            devices = discover(settings.devices, os.environ)
            _check_torch(devices)
            if not devices.items[0].is_cpu:
                _import_driver_bindings()
            self._generation = Generation(number, settings, devices, guard.take_refusal())
            _announce(log, devices)
        except (SettingError, DeviceError) as error:
            self._generation = Generation(number, problem=str(error))
        except Exception as error:
            self._generation = Generation(number, problem=_unexpected(log, error))


def _unexpected(log: Any, error: Exception) -> str:
    log.error("The arbiter could not prepare a worker", exc_info=error)
    return f"the arbiter could not prepare this worker: {error!r}"


def _check_torch(devices: Devices) -> None:
    if torch.version.cuda is None and not devices.items[0].is_cpu:
        raise DeviceError(
            f"torch {torch.__version__} is built without CUDA and cannot use {devices.items[0]}: install a CUDA build "
            "of torch, or set GPUWORKER_DEVICES=cpu."
        )


def _import_driver_bindings() -> None:
    """Here once and not in every worker: it takes longer than attaching to weights. It does not start the driver."""
    with suppress(ImportError):  # reported by the first worker that needs them
        import cuda.bindings.driver  # noqa: F401


def _announce(log: Any, devices: Devices) -> None:
    if devices.warning:
        log.warning(devices.warning)
    log.info("Devices, taken by the slots in turn: %s", "; ".join(map(str, devices.items)))


_manager = ServiceManager()
_inheritance = Inheritance(_manager)
_arbiter: Arbiter | None = None


def inherit() -> None:
    """Take over what the server before has left. Before gunicorn looks for sockets to listen at, and before an app that
    it preloads starts anything.
    """
    _inheritance.take(os.environ)


def take_seat(worker: Any) -> Seat:
    """The seat of a worker that is about to be forked.

    :raises HaltServer: at the first start of the server, when the worker could not serve.
    """
    global _arbiter
    first = _arbiter is None
    try:
        if _arbiter is None:
            _arbiter = Arbiter(app_is_here=worker.cfg.preload_app)
    except PreloadError as error:
        raise _halt(str(error)) from error
    except Exception as error:
        raise _halt(f"gpuworker could not be set up: {error!r}") from error
    seat = _arbiter.seat(worker)
    if first and seat.problem:
        raise _halt(seat.problem)
    return seat


def _halt(reason: str) -> HaltServer:
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        # Of the preloaded app; it may never end, and Python would wait for it.
        process.end_by_force(HALT_GRACE, 1)
    return HaltServer(reason, 1)


def worker_is_late(worker: Any) -> None:
    """Called in the arbiter, before gunicorn ends a worker that does not come back from a request."""
    try:
        seat: Seat = worker.seat
        deaths.report_timeout(seat.row.pid, seat.slot, seat.device, worker.log)
    except Exception as error:
        worker.log.error("The arbiter could not look at a worker that is late", exc_info=error)


def _mark_stop_signals(board: Scoreboard) -> None:
    """Let the workers know at once when the server shuts down.

    An old worker that waits for its successor cannot tell the SIGTERM of a HUP from that of a shutdown, and the arbiter
    of gunicorn 25 and later reads its signals only after it waited for the old workers.
    """
    arbiter = os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        handler = signal.getsignal(number)
        if not callable(handler):
            continue

        def mark_and_handle(sig: int, frame: Any, handle: Any = handler) -> None:
            if os.getpid() == arbiter:
                board.mark_stopping()
            handle(sig, frame)

        signal.signal(number, mark_and_handle)
