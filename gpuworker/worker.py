"""The worker classes: gunicorn's life cycle and nothing else. Each step is one call into a module beside this one."""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from gunicorn.workers.base import Worker
from gunicorn.workers.gthread import ThreadWorker
from gunicorn.workers.sync import SyncWorker

from gpuworker import faults, placement, process
from gpuworker.arbiter import prefork, preload
from gpuworker.arbiter.guard import guard
from gpuworker.boot import Boot, BootError
from gpuworker.context import CudaContext
from gpuworker.cpus import granted_cpus, threads_of_worker
from gpuworker.handover import POLL, may_leave, reload_failed
from gpuworker.standin import redirect
from gpuworker.status.scoreboard import Row
from gpuworker.weights import savings, share
from gpuworker.weights.store import StoreError

#: Seconds between two looks of an idle worker at whether it is old.
IDLE_POLL = 2.0


class _CudaMixin(Worker):
    """A slot, a device and a late start of CUDA for any of gunicorn's worker classes.

    :ivar slot: the slot of this worker, for hooks such as ``pre_fork``.
    :ivar seat: what the arbiter has given it.
    """

    _failed_reload = 0
    _next_sweep = 0.0

    # In the arbiter, before the fork.

    @classmethod
    def setup(cls) -> None:
        """Called by gunicorn whenever it reads its configuration, before a preloaded app is imported.

        :raises RuntimeError: at the first start only; gunicorn prints it and exits with 1.
        """
        prefork.inherit()
        try:
            guard.install()
            preload.watch()
        except Exception as error:
            raise RuntimeError(f"gpuworker cannot keep CUDA out of gunicorn's arbiter: {error!r}") from error

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seat = prefork.take_seat(self)
        self.slot = self.seat.slot

    @property
    def pid(self) -> Any:
        """Set by gunicorn, right after the fork, in the arbiter and in the worker."""
        return self._pid

    @pid.setter
    def pid(self, value: Any) -> None:
        self._pid = value
        if isinstance(value, int):
            self.seat.row.pid = value
            if value == os.getpid():
                guard.enter_worker()

    @property
    def age(self) -> int:
        """Number of the worker in the life of the server.

        From gunicorn 25 on the arbiter, deaf to signals, waits in ``reload()`` while it has workers older than the
        reload. When it was told to stop it has none.
        """
        return sys.maxsize if self.seat.board.stopping else self._age

    @age.setter
    def age(self, value: int) -> None:
        self._age = value

    @property
    def aborted(self) -> Any:
        """Set by gunicorn, in the arbiter, before it ends a worker whose request takes longer than ``--timeout``."""
        return self._aborted

    @aborted.setter
    def aborted(self, value: Any) -> None:
        self._aborted = value
        if value:
            prefork.worker_is_late(self)

    # In the worker.

    def init_process(self) -> None:
        """Boot and serve; the whole life of the worker."""
        # The reloader (development) ends a worker when a file has changed, but not one that waits for its next try.
        longest_wait = {"longest_wait": 1.0} if self.cfg.reload else {}
        self._boot = Boot(self.seat, self.log, self._is_wanted, **longest_wait)
        try:
            super().init_process()
        except (Exception, SystemExit) as error:
            if self.booted:
                raise
            if not self.alive:
                # Told to leave. What the app made of the SystemExit that interrupted it does not count.
                self._boot.end()
                sys.exit(error.code if isinstance(error, SystemExit) else 0)
            if isinstance(error, SystemExit):
                error = BootError(f"the app called sys.exit({error.code!r}) while it was imported")
            try:
                self._boot.fail(error)
            finally:
                self.alive = False

    def load_wsgi(self) -> None:
        """Import the app.

        gunicorn calls this when it has set the environment (``raw_env``), which would overwrite the device chosen here,
        and changed the user, which would clear the parent-death signal.
        """
        process.die_with(self.ppid)
        process.take_children_along()
        process.show_stacks_when_aborted(self.log)
        guard.remove()
        self._boot.begin()
        assert self.seat.device, "a seat without a device has a problem"
        placement.enter(self.slot, self.seat.device)
        process.reseed()
        self._set_threads()
        context = CudaContext(self.seat.device, self._boot.timed)
        context.start_at_first_use()
        self._stand_in_for_cuda()
        share.enter_worker(self.seat, self.log, self._boot, reloading=bool(self.cfg.reload))
        with self._boot.timed("app"):
            super().load_wsgi()
            share.bind_preloaded(self.seat.preloaded)
            share.bind_proxies()
        context.start()
        health = faults.CpuHealth() if self.seat.device.is_cpu else faults.CudaHealth()
        watch: Any = faults.Watch(self.wsgi, health, self.log, self.slot, self._retire)
        self.wsgi = watch

    def _retire(self) -> None:
        """Take no more requests, and leave: the device is lost to this process."""
        self.alive = False
        process.end_by_force(self.cfg.graceful_timeout, 0)

    def _stand_in_for_cuda(self) -> None:
        """On a CPU device: let an app that was written for ``cuda`` run all the same."""
        assert self.seat.device
        if not self.seat.device.is_cpu:
            return
        redirect.install(refuse=None, on_first_use=self._say_once_that_there_is_no_gpu)
        if self.seat.preloaded:
            redirect.use()

    def _say_once_that_there_is_no_gpu(self) -> None:
        row = self.seat.row
        if (self.slot, row.generation, row.times_ready) == (0, 1, 0):
            self.log.warning(
                "The app uses cuda, and this server runs on the CPU: what it puts on cuda stays in the memory of the "
                "machine and only claims to be on cuda:0. This stands in for a GPU in development."
            )

    def _set_threads(self) -> None:
        fair = threads_of_worker(self.seat.generation.settings, os.environ, self.cfg.workers, granted_cpus())
        # An app imported by the arbiter may have asked for a number itself.
        torch.set_num_threads(guard.threads or fair)

    def run(self) -> None:
        """Serve requests."""
        self._boot.ready()
        self._say_once_what_sharing_would_save()
        try:
            super().run()
        finally:
            # Its successor waits for its end, and Python would look through torch and all else for garbage first.
            gc.freeze()

    def _say_once_what_sharing_would_save(self) -> None:
        row, generation = self.seat.row, self.seat.generation
        if self.seat.preloaded or (self.slot, row.generation, row.times_ready) != (0, 1, 1):
            return
        assert self.seat.device
        assert generation.devices
        own = savings.own_bytes(on_cpu=self.seat.device.is_cpu)
        if text := savings.advice(own, self.cfg.workers, len(generation.devices.items)):
            self.log.info(text)

    def notify(self) -> None:
        """Called between requests; here an old worker also looks whether it may go."""
        super().notify()
        if self._is_old():
            self._leave_if_not_needed()
        elif time.monotonic() > self._next_sweep:
            self._sweep()

    def _sweep(self) -> None:
        """Drop the weights of generations that are gone; again in a while if one of them still lives."""
        try:
            look_again = share.drop_unused()
        except StoreError as error:
            self.log.error("Slot %d cannot drop the weights of the last generation: %s", self.slot, error)
            look_again = True
        self._next_sweep = time.monotonic() + IDLE_POLL if look_again else math.inf

    @property
    def max_requests(self) -> int:
        """After how many requests gunicorn has this worker leave; never, while it waits for its successor.

        Else the old workers would be gone one by one, and new ones that cannot start in their place.
        """
        waits = self._is_old() and not may_leave(*self._hand_over_state())
        return sys.maxsize if waits else self._max_requests

    @max_requests.setter
    def max_requests(self, value: int) -> None:
        self._max_requests = value

    def handle_exit(self, sig: int, frame: Any) -> None:
        """SIGTERM: leave after this request, or, after a HUP, when the new worker of the slot is ready."""
        if self.booted:
            # If the reload has failed, it is over, and the signal is meant for this worker. It has to have failed
            # before the request at hand: the signal may be as old. (One that is meant comes again.)
            over = self._failed_reload == self.seat.board.newest_generation
            self._leave_if_not_needed(at_once=over and reload_failed(*self._hand_over_state()))
        elif self.alive:
            self.alive = False
            sys.exit(0)

    def _is_old(self) -> bool:
        # Not just when told to leave: gunicorn tells only as many as there are too many, and spares one for a dead one.
        return self.seat.board.newest_generation > self.seat.generation.number

    def _leave_if_not_needed(self, at_once: bool = False) -> None:
        if not self.alive:
            return
        if self._orphaned() or self.seat.board.room_for > self.seat.generation.number:
            # Nobody kills this process if its request never ends.
            process.end_by_force(self.cfg.graceful_timeout, 1)
        elif not (at_once or self.seat.board.stopping or may_leave(*self._hand_over_state())):
            self._say_once_that_the_reload_failed()
            return
        super().handle_exit(signal.SIGTERM, None)

    def _say_once_that_the_reload_failed(self) -> None:
        newest = self.seat.board.newest_generation
        if self._failed_reload != newest and reload_failed(*self._hand_over_state()):
            self._failed_reload = newest
            besides = " and ignores --max-requests" if self.cfg.max_requests else ""
            message = "The reload failed, no new worker lives: slot %d serves on until the next HUP%s"
            self.log.error(message, self.slot, besides)

    def _hand_over_state(self) -> tuple[Row, int, Iterable[Row]]:
        board = self.seat.board
        return self.seat.row, board.newest_generation, board.rows()

    def _orphaned(self) -> bool:
        return self.ppid != os.getppid()

    def _is_wanted(self) -> bool:
        # A signal that a hung main thread cannot handle is still in the pipe that wakes it.
        signalled = select.select([self.PIPE[0]], [], [], 0)[0] if self.PIPE else []
        return self.alive and not (signalled or self.seat.board.stopping or self._orphaned())


class CudaWorker(_CudaMixin, SyncWorker):
    """gunicorn's sync worker on the GPU of its slot: ``gunicorn -k gpuworker.CudaWorker app:app``."""

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        """Called by gunicorn at its start."""
        if cfg.threads > 1:
            log.warning(
                "--threads %d has no effect on gpuworker.CudaWorker, which serves one request at a time: "
                "for threads use -k gpuworker.CudaThreadWorker.",
                cfg.threads,
            )

    def wait(self, timeout: float) -> Any:
        """Wait for a connection, but not for long: neither a reload nor a successor that is ready gives a sign."""
        limit = min(timeout, POLL if self._is_old() else IDLE_POLL)
        return super().wait(limit)  # type: ignore[arg-type]  # a float in gunicorn, too


class CudaThreadWorker(_CudaMixin, ThreadWorker):
    """gunicorn's gthread worker on the GPU of its slot: ``-k gpuworker.CudaThreadWorker --threads 4``."""

    def handle(self, conn: Any) -> Any:
        """Called by gunicorn for each request, in a thread of its own."""
        redirect.enter_thread()
        return super().handle(conn)
