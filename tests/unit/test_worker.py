"""What the arbiter and gunicorn's loops read of a worker, and when a worker takes a SIGTERM for itself."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from gpuworker import CudaWorker
from gpuworker.arbiter import prefork
from gpuworker.process import NOBODY
from gpuworker.status.scoreboard import Row, Scoreboard


class Log:
    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, text: str, *args: object) -> None:
        self.errors.append(text % args)


@pytest.fixture
def worker(board: Scoreboard) -> CudaWorker:
    """An old worker that serves, of slot 0 in generation 1."""
    worker = CudaWorker.__new__(CudaWorker)
    row = add_row(board, 1, pid=os.getpid(), times_ready=1)
    worker.seat = SimpleNamespace(row=row, board=board, generation=SimpleNamespace(number=1))
    worker.slot, worker.alive, worker.booted, worker.ppid = 0, True, True, os.getppid()
    worker.cfg, worker.log = SimpleNamespace(max_requests=0), Log()
    board.newest_generation = 1
    return worker


def add_row(board: Scoreboard, generation: int, pid: int, times_ready: int = 0) -> Row:
    row = board.new_row()
    row.generation, row.pid, row.times_ready = generation, pid, times_ready
    return row


def reload(board: Scoreboard) -> Row:
    """The row of a new worker that loads."""
    board.newest_generation += 1
    return add_row(board, board.newest_generation, pid=os.getpid())


def test_sigterm_ends_a_worker(worker: CudaWorker) -> None:
    worker.handle_exit(signal.SIGTERM, None)
    assert not worker.alive


def test_sigterm_does_not_end_the_worker_of_a_reload_that_has_just_failed(
    worker: CudaWorker, board: Scoreboard
) -> None:
    # Sent while the new worker lived, and handled late, because the old one was busy.
    reload(board).pid = NOBODY
    worker.handle_exit(signal.SIGTERM, None)
    assert worker.alive
    # One that comes after it has looked is meant for it.
    worker.handle_exit(signal.SIGTERM, None)
    assert not worker.alive


def test_a_second_reload_starts_all_over(worker: CudaWorker, board: Scoreboard) -> None:
    reload(board).pid = NOBODY
    worker.handle_exit(signal.SIGTERM, None)
    reload(board)
    worker.handle_exit(signal.SIGTERM, None)
    assert worker.alive
    assert len(worker.log.errors) == 1


def test_an_old_worker_has_no_limit_of_requests_while_it_is_needed(worker: CudaWorker, board: Scoreboard) -> None:
    worker.max_requests = 5
    assert worker.max_requests == 5
    new = reload(board)
    assert worker.max_requests == sys.maxsize
    new.pid = NOBODY
    assert worker.max_requests == sys.maxsize
    new.times_ready = 1
    assert worker.max_requests == 5


def test_no_worker_is_older_than_a_reload_when_the_server_stops(worker: CudaWorker, board: Scoreboard) -> None:
    worker.age = 3
    assert worker.age == 3
    board.mark_stopping()
    assert worker.age > 10**9


def test_a_generation_is_not_the_newest_before_it_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # An old worker that looked in between would take the reload for one that failed, and the SIGTERM for itself.
    monkeypatch.setattr(prefork, "_mark_stop_signals", lambda board: None)
    monkeypatch.setattr(prefork, "Locks", object)
    monkeypatch.setattr(prefork.Arbiter, "_settle_stores", lambda self, worker: None)
    monkeypatch.setattr(prefork.Arbiter, "_keep_stores", lambda self, log: None)
    monkeypatch.setattr(prefork.Arbiter, "_store_of", lambda self, device: None)
    monkeypatch.setattr(prefork.preload, "finish", lambda *, app_is_here: None)
    monkeypatch.setenv("GPUWORKER_DEVICES", "cpu")
    arbiter = prefork.Arbiter(app_is_here=False)
    board, seen = arbiter._board, []
    take = arbiter._slots.take
    monkeypatch.setattr(arbiter._slots, "take", lambda *args: (seen.append(board.newest_generation), take(*args))[1])
    for _ in range(2):
        arbiter.seat(
            SimpleNamespace(
                cfg=object(),
                tmp=SimpleNamespace(fileno=lambda: 3),
                log=SimpleNamespace(info=lambda *args: None, warning=lambda *args: None),
            )
        )
        seen.append(board.newest_generation)
    assert seen == [0, 1, 1, 2]
