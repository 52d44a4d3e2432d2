"""A worker between its fork and its first request: how long it may take, and what happens when it fails.

One rule for every failure, be it an app that cannot be imported, a loader that raises or hangs, or a device that does
not work. If no worker of this server was ever ready, the server stops with an error. Otherwise the others serve on, and
this one waits, longer each time, and leaves; gunicorn forks a new one, which tries again in a fresh process (a half
imported app and a CUDA that failed to start are not to be had back in the old one).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from gunicorn.arbiter import Arbiter
from gunicorn.errors import AppImportError

from gpuworker.arbiter.prefork import Seat
from gpuworker.status.scoreboard import State

#: Seconds between two lines that say that a worker still loads.
REPORT_EVERY = 10.0
#: Seconds to the next try after the first failure; doubled with each, up to the longest.
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 30.0
#: Seconds in which the arbiter stops the others when the first worker of a server failed.
STOP_GRACE = 10.0
#: Seconds past the deadline after which a process that holds the interpreter lock is ended, by a thread without it.
STUCK_GRACE = 5.0


class BootError(RuntimeError):
    """This worker must not serve. The message is complete: no traceback is needed to understand it."""


class Boot:
    """The boot of one worker.

    :param wanted: whether the worker is still to serve; asked while it waits.
    """

    def __init__(self, seat: Seat, log: Any, wanted: Callable[[], bool]) -> None:
        self._seat = seat
        self._log = log
        self._wanted = wanted
        self._started = time.monotonic()
        self._over = threading.Event()
        self._watch: threading.Thread | None = None
        self.seconds = {"context": 0.0, "app": 0.0, "weights": 0.0}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time spent here as `part`, and that of parts inside it as theirs only."""
        start, others = time.monotonic(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - others
            self.seconds[part] += time.monotonic() - start - inside

    def begin(self) -> None:
        """Start the clock of ``GPUWORKER_LOAD_TIMEOUT``.

        :raises BootError: if this worker must not serve, or the last one in its seat hung beyond rescue.
        """
        row = self._seat.row
        overdue = row.deadline and time.monotonic() > row.deadline + STUCK_GRACE
        row.state, row.deadline = State.LOADING, 0.0
        if self._seat.problem:
            raise BootError(self._seat.problem)
        limit = self._seat.generation.settings.load_timeout
        if overdue:
            raise BootError(
                f"the last worker of slot {self._seat.slot} was still loading after {limit:g} s and had to be killed"
            )
        row.deadline = self._started + limit
        faulthandler.dump_traceback_later(
            limit + STUCK_GRACE, exit=True, file=2
        )  # the descriptor: sys.stderr may be none
        self._watch = threading.Thread(target=self._report_and_limit, args=(limit,), name="gpuworker-load", daemon=True)
        self._watch.start()

    def end(self) -> None:
        """Stop the clock."""
        self._over.set()
        if self._watch:
            self._watch.join()
            faulthandler.cancel_dump_traceback_later()
        self._seat.row.deadline = 0.0

    def ready(self) -> None:
        """Note that the worker serves from now on."""
        self.end()
        row = self._seat.row
        row.failures = 0
        row.times_ready += 1
        row.state = State.READY
        self._seat.board.mark_ever_ready()
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
        total = time.monotonic() - self._started
        self._log.info("Slot %d on %s ready in %.2f s: %s", self._seat.slot, self._seat.device, total, parts)

    def fail(self, error: BaseException) -> NoReturn:
        """End this worker by the one rule.

        :raises Exception: `error`, for gunicorn to print and to stop the server.
        :raises SystemExit: otherwise.
        """
        self.end()
        if self._stops_the_server():
            if isinstance(error, BootError):
                self._log.error("Slot %d cannot start: %s", self._seat.slot, error)
                sys.exit(Arbiter.WORKER_BOOT_ERROR)
            raise error
        if self._wanted():
            delay = self._count_failure()
            # The first failure with its traceback, the same one again in a line.
            explained = isinstance(error, (BootError, AppImportError)) or self._seat.row.failures > 1
            message = "Slot %d cannot start, next try in %g s: %s"
            self._log.error(message, self._seat.slot, delay, _describe(error), exc_info=None if explained else error)
            self._wait(delay)
        sys.exit(0)

    def _stops_the_server(self) -> bool:
        """Whether this worker is the one that stops a server of which no worker was ever ready, and says why.

        The others wait for it, without a word, and are not wanted any more when this returns.
        """
        board = self._seat.board
        if board.ever_ready:
            return False
        if not board.claim_report():
            self._wait(STOP_GRACE)
            if board.ever_ready or not self._wanted():
                return False
            # Still here: the one that was to stop the server has been killed.
        board.mark_stopping()
        return True

    def _count_failure(self) -> float:
        row = self._seat.row
        row.failures += 1
        row.state = State.RETRYING
        return float(min(BACKOFF_LONGEST, BACKOFF_FIRST * 2 ** min(row.failures - 1, 10)))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._wanted() and time.monotonic() < until:
            time.sleep(0.05)

    def _report_and_limit(self, limit: float) -> None:
        deadline = self._started + limit
        while not self._over.wait(min(REPORT_EVERY, max(0.0, deadline - time.monotonic()))):
            elapsed = time.monotonic() - self._started
            if elapsed >= limit:
                self._overrun(limit)
            self._log.info("Slot %d still loading, %.0f s", self._seat.slot, elapsed)

    def _overrun(self, limit: float) -> NoReturn:
        """End the process from this thread: the main thread hangs, and nobody knows what it holds."""
        stop = self._stops_the_server()
        if stop or self._wanted():
            stack = "".join(traceback.format_stack(sys._current_frames().get(threading.main_thread().ident or 0)))
            message = "Slot %d is still loading after GPUWORKER_LOAD_TIMEOUT=%g s and is ended. It hangs here:\n%s"
            self._log.critical(message, self._seat.slot, limit, stack)
        if not stop:
            self._wait(self._count_failure())
        os._exit(Arbiter.WORKER_BOOT_ERROR if stop else 0)


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, (BootError, AppImportError)) else f"{type(error).__name__}: {error}"
