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

from gpuworker import process
from gpuworker.arbiter.prefork import Seat
from gpuworker.context import DeviceUnavailableError
from gpuworker.status.scoreboard import State

#: Seconds between two lines that say that a worker still loads.
REPORT_EVERY = 10.0
#: Seconds between two log lines that a device is lost.
LOST_EVERY = 60.0
#: Seconds to the next try after the first failure; doubled with each, up to the longest.
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 30.0
#: Seconds in which the arbiter stops the others when the first worker of a server failed.
STOP_GRACE = 10.0
#: Seconds past the deadline after which a process that holds the interpreter lock is ended, by a thread without it.
STUCK_GRACE = 5.0
#: Seconds after that in which the next worker of the slot comes to see it.
STUCK_SEEN = 60.0


class BootError(RuntimeError):
    """This worker must not serve. The message is complete: no traceback is needed to understand it."""


#: Errors that say all there is to say.
_EXPLAINED = (BootError, AppImportError, DeviceUnavailableError)


class Boot:
    """The boot of one worker.

    :param wanted: whether the worker is still to serve; asked while it waits.
    :param longest_wait: seconds between two tries, at most.
    """

    def __init__(self, seat: Seat, log: Any, wanted: Callable[[], bool], longest_wait: float = BACKOFF_LONGEST) -> None:
        self._seat = seat
        self._board = seat.board
        self._log = log
        self._wanted = wanted
        self._longest_wait = longest_wait
        self._started = time.monotonic()
        self._clock = self._started
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
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - start - inside

    def begin(self) -> None:
        """Start the clock of ``GPUWORKER_LOAD_TIMEOUT``.

        :raises BootError: if this worker must not serve, or the last one in its seat hung beyond rescue.
        """
        row = self._seat.row
        crashed, deadline = row.state == State.LOADING, row.deadline
        row.state, row.deadline = State.LOADING, 0.0
        if self._seat.problem:
            raise BootError(self._seat.problem)
        limit = self._seat.generation.settings.load_timeout
        if deadline and 0 < time.monotonic() - deadline - STUCK_GRACE < STUCK_SEEN:
            raise BootError(f"the last one was still loading after {limit:g} s and had to be killed")
        if crashed:
            self._wait_after_crash()
        self._watch = threading.Thread(target=self._report_and_limit, args=(limit,), name="gpuworker-load", daemon=True)
        self.restart_clock()
        self._watch.start()

    def restart_clock(self) -> None:
        """Let the deadline be as far away as at the begin; for a worker that has waited for another to load."""
        if self._over.is_set():
            return
        limit = self._seat.generation.settings.load_timeout
        self._clock = time.monotonic()
        self._seat.row.deadline = self._clock + limit
        faulthandler.dump_traceback_later(limit + STUCK_GRACE, exit=True, file=2)  # not sys.stderr: it may be none

    def end(self) -> None:
        """Stop the clock."""
        self._over.set()
        if self._watch:
            self._watch.join()
            faulthandler.cancel_dump_traceback_later()
        self._seat.row.deadline = 0.0
        self._seat.row.state = State.BOOTING

    def ready(self) -> None:
        """Note that the worker serves from now on."""
        self.end()
        row = self._seat.row
        row.failures = 0
        row.times_ready += 1
        row.state = State.READY
        self._board.mark_ever_ready()
        parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in self.seconds.items())
        total = time.monotonic() - self._started
        self._log.info("Slot %d on %s ready in %.3f s: %s", self._seat.slot, self._seat.device, total, parts)

    def fail(self, error: BaseException) -> NoReturn:
        """End this worker by the one rule.

        :raises Exception: `error`, for gunicorn to print and to stop the server.
        :raises SystemExit: otherwise.
        """
        self.end()
        code = self._settle(error)
        # The app may have left a thread that Python would wait for.
        process.end_by_force(STUCK_GRACE, code)
        if code and not isinstance(error, BootError) and not self._board.explained:
            self._board.mark_explained()
            raise error
        sys.exit(code)

    def _settle(self, error: BaseException, *, wait: bool = True) -> int:
        """Report `error` by the one rule and `wait` for the time of the next try.

        :returns: the code to exit with.
        """
        slot = self._seat.slot
        text = str(error) if isinstance(error, _EXPLAINED) else f"{type(error).__name__}: {error}"
        if self._stops_the_server():
            if isinstance(error, BootError) or self._board.explained:
                self._log.error("Slot %d cannot start: %s", slot, text)
            return Arbiter.WORKER_BOOT_ERROR
        if self._wanted():
            delay = self._count_failure() if wait else 0.0
            # The first failure with its traceback, the same one again in a line.
            explained = isinstance(error, _EXPLAINED) or self._seat.row.failures > 1
            next_ = "the old worker serves on" if self._replaces_a_living_one() else f"next try in {delay:g} s"
            if not self._is_known(error):
                self._log.error(
                    "Slot %d cannot start, %s: %s", slot, next_, text, exc_info=None if explained else error
                )
            self._wait(delay)
        return 0

    def _is_known(self, error: BaseException) -> bool:
        """Whether the log has said lately that the device is lost, which may last for days."""
        if not isinstance(error, DeviceUnavailableError):
            return False
        row, now = self._seat.row, time.monotonic()
        if row.reported and now - row.reported < LOST_EVERY:
            return True
        row.reported = now
        return False

    def _stops_the_server(self) -> bool:
        """Whether this worker is the one that stops a server of which no worker was ever ready, and says why.

        The others wait to be told to leave, without a word.
        """
        if self._board.ever_ready:
            return False
        if self._board.claim_report():
            return True
        self._wait(STOP_GRACE)
        # If it is still wanted, the one that was to stop the server has been killed, or gunicorn (22 and 23 raise their
        # HaltServer in a signal handler) has lost the news.
        return self._wanted() and not self._board.ever_ready

    def _replaces_a_living_one(self) -> bool:
        own = self._seat.row
        older = (row for row in self._board.rows() if 0 < row.generation < own.generation and row.times_ready)
        return any(row.slot == own.slot and process.exists(row.pid) for row in older)

    def _count_failure(self) -> float:
        """Seconds to wait for the next try."""
        row = self._seat.row
        row.failures += 1
        row.state = State.RETRYING
        return float(min(self._longest_wait, BACKOFF_FIRST * 2 ** min(row.failures - 1, 10)))

    def _wait_after_crash(self) -> None:
        """Slow a slot down whose workers die while they load, by a signal or the kernel; the first time is free."""
        if self._seat.row.failures:
            self._log.warning("The last worker of slot %d died while it was loading", self._seat.slot)
            self._wait(self._count_failure())
        self._seat.row.failures += not self._seat.row.failures
        self._seat.row.state = State.LOADING

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._wanted() and time.monotonic() < until:
            time.sleep(0.05)

    def _report_and_limit(self, limit: float) -> None:
        while not self._over.wait(min(REPORT_EVERY, max(0.0, self._clock + limit - time.monotonic()))):
            if time.monotonic() - self._clock >= limit:
                # From this thread: the main thread hangs, and nobody knows what it holds. Without a wait, since it may
                # hold what another worker needs to load; the deadline is wait enough.
                # Reported here, so the next worker of the slot must not report it as one that nobody could.
                self._seat.row.deadline = 0.0
                os._exit(self._settle(self._hung(limit), wait=False))
            self._log.info("Slot %d still loading, %.0f s", self._seat.slot, time.monotonic() - self._started)

    def _hung(self, limit: float) -> BootError:
        stack = "".join(traceback.format_stack(sys._current_frames().get(threading.main_thread().ident or 0)))
        return BootError(
            f"still loading after GPUWORKER_LOAD_TIMEOUT={limit:g} s, it is ended. It hangs here:\n{stack}"
        )
