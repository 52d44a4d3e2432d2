from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest

from gpuworker.status.scoreboard import CAPACITY, Row, Scoreboard, State

# Python 3.12 and later warn of forks in a process with threads, which torch may have started.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def start_child(action: Callable[[], object]) -> int:
    """Fork a child that exits with what `action` returns, as a number, or with 99 if it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = int(action() or 0)  # type: ignore[call-overload]
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_child(action: Callable[[], object]) -> int:
    return exit_code(start_child(action))


def test_a_new_board_is_empty(board: Scoreboard) -> None:
    assert list(board.rows()) == []
    assert (board.newest_generation, board.ever_ready, board.stopping) == (0, False, False)


def test_a_new_row_is_all_zeros(board: Scoreboard) -> None:
    row = board.new_row()
    assert [getattr(row, name) for name, _ in Row._fields_] == [0] * len(Row._fields_)


def test_rows_gives_the_rows_in_use(board: Scoreboard) -> None:
    for slot in range(3):
        board.new_row().slot = slot
    assert [row.slot for row in board.rows()] == [0, 1, 2]


def test_rows_gives_the_row_itself(board: Scoreboard) -> None:
    row = board.new_row()
    next(board.rows()).pid = 7
    assert row.pid == 7


def test_a_row_holds_what_was_written(board: Scoreboard) -> None:
    rows = [board.new_row() for _ in range(3)]
    rows[1].generation, rows[1].slot, rows[1].pid, rows[1].state = 2**32 - 1, 4095, 2**22, State.RETRYING
    rows[1].times_ready, rows[1].failures, rows[1].deadline = 5, 6, 12345.678
    row = list(board.rows())[1]
    assert (row.generation, row.slot, row.pid, row.state) == (2**32 - 1, 4095, 2**22, State.RETRYING)
    assert (row.times_ready, row.failures, row.deadline) == (5, 6, 12345.678)


def test_writing_a_row_leaves_its_neighbours_alone(board: Scoreboard) -> None:
    before, row, after = (board.new_row() for _ in range(3))
    ctypes.memset(ctypes.addressof(row), 0xFF, ctypes.sizeof(row))
    assert bytes(before) == bytes(after) == bytes(ctypes.sizeof(Row))
    assert (board.newest_generation, board.ever_ready, board.stopping) == (0, False, False)


def test_fields_are_aligned(board: Scoreboard) -> None:
    for row in (board.new_row(), board.new_row()):
        for name, kind in Row._fields_:
            assert (ctypes.addressof(row) + getattr(Row, name).offset) % ctypes.sizeof(kind) == 0


def test_a_full_table_raises(board: Scoreboard) -> None:
    for _ in range(CAPACITY):
        last = board.new_row()
    last.deadline = 1.0  # the last row is within the mapping
    with pytest.raises(RuntimeError, match=f"the scoreboard is full: {CAPACITY} workers"):
        board.new_row()


def test_a_full_table_is_still_readable(board: Scoreboard) -> None:
    for _ in range(CAPACITY):
        board.new_row()
    with pytest.raises(RuntimeError):
        board.new_row()
    assert len(list(board.rows())) == CAPACITY


def test_the_parent_sees_what_a_child_writes_into_a_row(board: Scoreboard) -> None:
    row = board.new_row()

    def write() -> None:
        row.pid, row.state, row.times_ready, row.deadline = os.getpid(), State.READY, 1, 2.5

    pid = start_child(write)
    assert exit_code(pid) == 0
    assert (row.pid, row.state, row.times_ready, row.deadline) == (pid, State.READY, 1, 2.5)


def test_the_parent_sees_that_a_child_was_ready(board: Scoreboard) -> None:
    assert run_child(board.mark_ever_ready) == 0
    assert board.ever_ready


def test_the_parent_sees_that_a_child_marked_the_stop(board: Scoreboard) -> None:
    assert run_child(board.mark_stopping) == 0
    assert board.stopping


def test_a_child_sees_what_the_parent_writes_after_the_fork(board: Scoreboard) -> None:
    read, write = os.pipe()

    def look() -> int:
        os.read(read, 1)
        return board.newest_generation * 10 + len(list(board.rows()))

    pid = start_child(look)
    board.newest_generation = 4
    board.new_row()
    os.write(write, b".")
    assert exit_code(pid) == 41
    os.close(read)
    os.close(write)


def test_children_see_each_other(board: Scoreboard) -> None:
    row = board.new_row()
    run_child(lambda: setattr(row, "failures", 3))
    assert run_child(lambda: row.failures) == 3


def test_marks_may_be_set_twice(board: Scoreboard) -> None:
    for _ in range(2):
        board.mark_ever_ready()
        board.mark_stopping()
    assert board.ever_ready
    assert board.stopping


def test_the_report_is_claimed_once(board: Scoreboard) -> None:
    assert [board.claim_report() for _ in range(3)] == [True, False, False]


def test_the_report_is_claimed_by_one_of_many_children(board: Scoreboard) -> None:
    gate, keep_shut = os.pipe()

    def claim() -> int:
        os.close(keep_shut)
        os.read(gate, 1)  # all children go on together, when the parent closes its end
        return board.claim_report()

    children = [start_child(claim) for _ in range(8)]
    os.close(gate)
    os.close(keep_shut)
    assert sorted(exit_code(pid) for pid in children) == [0] * 7 + [1]


def test_what_a_child_claimed_the_parent_cannot(board: Scoreboard) -> None:
    assert run_child(board.claim_report) == 1
    assert not board.claim_report()


def test_every_board_has_a_report_of_its_own() -> None:
    assert [Scoreboard().claim_report() for _ in range(2)] == [True, True]
