from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuworker import handover
from gpuworker.handover import make_room, may_leave, reload_failed
from gpuworker.process import NOBODY, exists
from gpuworker.status.scoreboard import Row, Scoreboard

ALIVE, DEAD = 1000, 2000
SLOT = 1


def row(generation: int, slot: int, pid: int, *, times_ready: int = 0) -> Row:
    return Row(generation=generation, slot=slot, pid=pid, times_ready=times_ready)


OWN = row(1, SLOT, ALIVE, times_ready=1)


@pytest.mark.parametrize(
    ("newer", "answer"),
    [
        pytest.param([], False, id="the-new-generation-has-no-worker-yet"),
        pytest.param([row(2, SLOT, ALIVE, times_ready=1)], True, id="successor-ready"),
        pytest.param([row(2, SLOT, DEAD, times_ready=1)], True, id="successor-was-ready-and-died"),
        pytest.param([row(2, SLOT, 0, times_ready=1)], True, id="successor-was-ready-and-is-forked-again"),
        pytest.param([row(2, SLOT, ALIVE)], False, id="successor-alive-not-ready"),
        pytest.param(
            [row(2, SLOT, ALIVE), row(2, 0, ALIVE, times_ready=1)],
            False,
            id="successor-alive-not-ready-another-ready",
        ),
        pytest.param([row(2, SLOT, DEAD)], False, id="successor-dead-no-other"),
        pytest.param([row(2, SLOT, DEAD), row(2, 0, ALIVE)], False, id="successor-dead-another-not-ready"),
        pytest.param([row(2, SLOT, DEAD), row(2, 0, ALIVE, times_ready=1)], True, id="successor-dead-another-ready"),
        pytest.param([row(2, 0, DEAD), row(2, SLOT, DEAD), row(2, 2, DEAD)], False, id="all-dead-none-ever-ready"),
        pytest.param([row(2, 0, ALIVE, times_ready=1)], True, id="slot-gone-another-ready"),
        pytest.param([row(2, 0, ALIVE)], False, id="slot-gone-another-not-ready"),
        pytest.param([row(2, SLOT, DEAD, times_ready=1), row(3, SLOT, ALIVE)], True, id="ready-in-the-first-of-two"),
        pytest.param([row(2, SLOT, ALIVE), row(3, SLOT, ALIVE, times_ready=1)], True, id="ready-in-the-second-of-two"),
        pytest.param([row(2, SLOT, DEAD), row(3, SLOT, ALIVE)], False, id="alive-in-the-second-of-two"),
        pytest.param(
            [row(2, SLOT, DEAD), row(3, SLOT, ALIVE), row(3, 0, ALIVE, times_ready=1)],
            False,
            id="alive-in-the-second-of-two-another-ready",
        ),
        pytest.param(
            [row(2, SLOT, DEAD), row(3, SLOT, DEAD), row(3, 0, ALIVE, times_ready=1)],
            True,
            id="dead-in-both-another-ready",
        ),
    ],
)
def test_an_old_worker_leaves_when_it_is_no_longer_needed(newer: list[Row], answer: bool) -> None:
    newest = max([2, *(row.generation for row in newer)])
    assert may_leave(OWN, newest, [OWN, *newer], alive=lambda pid: pid != DEAD) is answer


@pytest.mark.parametrize("newest", [0, 1])
def test_a_worker_of_the_newest_generation_leaves_at_once(newest: int) -> None:
    assert may_leave(OWN, newest, [OWN], alive=lambda pid: True)


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = [row(2, 0, ALIVE, times_ready=1), row(2, SLOT, ALIVE), OWN]
    assert not may_leave(OWN, 2, rows, alive=lambda pid: True)
    assert not may_leave(OWN, 2, reversed(rows), alive=lambda pid: True)


@pytest.mark.parametrize("generation", [1, 2])
def test_ready_workers_of_the_own_and_older_generations_do_not_count(generation: int) -> None:
    own = row(2, SLOT, ALIVE)
    rows = [own, row(generation, SLOT, ALIVE, times_ready=1), row(generation, 0, ALIVE, times_ready=1)]
    assert not may_leave(own, 3, rows, alive=lambda pid: True)


def test_rows_that_are_just_prepared_do_not_count() -> None:
    assert not may_leave(OWN, 2, [OWN, row(0, SLOT, 0, times_ready=1)], alive=lambda pid: True)


def test_a_successor_about_to_be_forked_counts_as_alive() -> None:
    assert not may_leave(OWN, 2, [OWN, row(2, SLOT, 0), row(2, 0, os.getpid(), times_ready=1)])


def test_by_default_processes_are_looked_up(no_process: int) -> None:
    ready = row(2, 0, os.getpid(), times_ready=1)
    assert not may_leave(OWN, 2, [OWN, row(2, SLOT, os.getpid()), ready])
    assert may_leave(OWN, 2, [OWN, row(2, SLOT, no_process), ready])


@pytest.fixture
def no_process() -> int:
    """A pid that no process can have: pids stay below the limit."""
    return int(Path("/proc/sys/kernel/pid_max").read_text())


@pytest.mark.parametrize("pid", [0, os.getpid(), os.getppid()], ids=["unborn", "self", "parent"])
def test_a_process_that_exists(pid: int) -> None:
    assert exists(pid)


def test_a_process_that_does_not_exist(no_process: int) -> None:
    assert not exists(no_process)


def test_a_process_that_was_reaped_does_not_exist() -> None:
    assert not exists(NOBODY)


def test_a_process_of_another_user_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    assert exists(1)


# A reload that failed


@pytest.mark.parametrize(
    ("newest", "rows", "answer"),
    [
        pytest.param(1, [], False, id="no reload"),
        pytest.param(2, [], True, id="nobody could be forked"),
        pytest.param(2, [row(2, 0, 10), row(2, 1, 11)], True, id="all dead"),
        pytest.param(2, [row(2, 0, 10), row(2, 1, 99)], False, id="one still starts"),
        pytest.param(2, [row(2, 0, 10, times_ready=1)], False, id="one was ready"),
        pytest.param(3, [row(2, 0, 10), row(3, 0, 99)], False, id="the last of two reloads goes on"),
    ],
)
def test_reload_failed(newest: int, rows: list[Row], answer: bool) -> None:
    assert reload_failed(OWN, newest, [OWN, *rows], lambda pid: pid == 99) is answer


# Room for new weights.


@pytest.fixture
def living(board: Scoreboard, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The generations of the workers that live; at each look one less, once they have been asked to leave."""
    generations: list[int] = []

    def one_leaves(seconds: float) -> None:
        assert board.room_for == 3
        generations.pop(0)

    monkeypatch.setattr(handover.time, "sleep", one_leaves)
    monkeypatch.setattr(Scoreboard, "living_generations", lambda board: set(generations))
    return generations


def test_older_workers_make_room(board: Scoreboard, living: list[int]) -> None:
    living += [1, 1, 2, 3, 3]
    make_room(board, 3)
    assert living == [3, 3]


@pytest.mark.parametrize("others", [[], [0], [3], [4], [0, 3, 4]])
def test_nobody_else_is_asked_to_leave(board: Scoreboard, living: list[int], others: list[int]) -> None:
    living += others
    make_room(board, 3)
    assert living == others
    assert board.room_for == 0
