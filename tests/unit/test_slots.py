from __future__ import annotations

import random

import pytest

from gpuworker.arbiter.slots import SlotTable, lowest_free
from gpuworker.process import NOBODY
from gpuworker.status.scoreboard import CAPACITY, Scoreboard, State


class FakeTmp:
    """A file as far as it is asked: like a real one it raises ValueError once closed."""

    closed = False

    def fileno(self) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return 3


class FakeWorker:
    def __init__(self) -> None:
        self.tmp = FakeTmp()

    def reap(self) -> None:
        self.tmp.closed = True


@pytest.fixture
def table(board: Scoreboard) -> SlotTable:
    return SlotTable(board)


def take(table: SlotTable, count: int, generation: int = 1) -> list[FakeWorker]:
    workers = [FakeWorker() for _ in range(count)]
    for worker in workers:
        table.take(worker, generation)
    return workers


@pytest.mark.parametrize(
    ("taken", "slot"), [([], 0), ([0], 1), ([1], 0), ([0, 1, 2], 3), ([2, 0], 1), ([0, 2, 3], 1), ([3, 1, 0, 5], 2)]
)
def test_lowest_free(taken: list[int], slot: int) -> None:
    assert lowest_free(taken) == slot


def test_slots_count_from_0(table: SlotTable) -> None:
    assert [table.take(FakeWorker(), 1).slot for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_the_slot_of_a_reaped_worker_is_given_out_again(table: SlotTable, slot: int) -> None:
    take(table, 3)[slot].reap()
    assert [table.take(FakeWorker(), 1).slot for _ in range(2)] == [slot, 3]


def test_a_row_does_not_keep_the_pid_of_a_reaped_worker(table: SlotTable, board: Scoreboard) -> None:
    # The kernel may give the number to a process that has nothing to do with this server.
    workers = take(table, 2)
    for row in board.rows():
        row.pid = 4321
    workers[0].reap()
    take(table, 1, generation=2)
    assert [row.pid for row in board.rows()] == [NOBODY, 4321, 0]


def test_the_lowest_of_several_free_slots_comes_first(table: SlotTable) -> None:
    workers = take(table, 4)
    for worker in (workers[3], workers[1]):
        worker.reap()
    assert [table.take(FakeWorker(), 1).slot for _ in range(2)] == [1, 3]


def test_a_slot_is_kept_until_its_worker_has_been_reaped(table: SlotTable) -> None:
    worker = FakeWorker()
    row = table.take(worker, 1)
    row.pid, row.state = 4321, State.RETRYING  # whatever the worker says of itself
    assert table.take(FakeWorker(), 1).slot == 1
    worker.reap()
    assert table.take(FakeWorker(), 1).slot == 0


def test_generations_count_for_themselves(table: SlotTable) -> None:
    take(table, 3, generation=1)
    assert [table.take(FakeWorker(), 2).slot for _ in range(3)] == [0, 1, 2]
    assert table.take(FakeWorker(), 1).slot == 3


def test_workers_of_two_generations_in_one_slot_have_rows_of_their_own(table: SlotTable) -> None:
    old, new = table.take(FakeWorker(), 1), table.take(FakeWorker(), 2)
    old.pid, new.pid = 11, 22
    assert [(row.generation, row.slot, row.pid) for row in (old, new)] == [(1, 0, 11), (2, 0, 22)]


def test_a_new_row_says_that_its_worker_is_about_to_be_forked(table: SlotTable) -> None:
    row = table.take(FakeWorker(), 3)
    assert (row.generation, row.slot, row.pid, row.state) == (3, 0, 0, State.BOOTING)
    assert (row.times_ready, row.failures, row.deadline) == (0, 0, 0.0)


def test_the_next_worker_of_a_slot_inherits_its_counts(table: SlotTable) -> None:
    worker = FakeWorker()
    row = table.take(worker, 1)
    row.times_ready, row.failures, row.deadline = 2, 3, 4.5
    worker.reap()
    row = table.take(FakeWorker(), 1)
    assert (row.times_ready, row.failures, row.deadline) == (2, 3, 4.5)


def test_the_next_worker_of_a_slot_starts_without_pid(table: SlotTable) -> None:
    worker = FakeWorker()
    row = table.take(worker, 1)
    row.pid, row.state = 4321, State.READY
    worker.reap()
    row = table.take(FakeWorker(), 1)
    assert (row.pid, row.state) == (0, State.READY)  # what its last worker did, until the new one runs


def test_a_row_of_a_dead_generation_is_used_again(table: SlotTable, board: Scoreboard) -> None:
    for worker in take(table, 2, generation=1):
        worker.reap()
    take(table, 2, generation=2)
    assert sorted((row.generation, row.slot) for row in board.rows()) == [(2, 0), (2, 1)]


def test_a_row_used_again_starts_from_nothing(table: SlotTable) -> None:
    worker = FakeWorker()
    row = table.take(worker, 1)
    row.pid, row.state, row.times_ready, row.failures, row.deadline = 1, State.READY, 2, 3, 4.5
    worker.reap()
    row = table.take(FakeWorker(), 2)
    assert (row.pid, row.state, row.times_ready, row.failures, row.deadline) == (0, State.BOOTING, 0, 0, 0.0)


def test_a_row_of_a_live_generation_is_not_used_again(table: SlotTable, board: Scoreboard) -> None:
    _, dead = take(table, 2, generation=1)  # its counts are still asked for: a worker of the slot may come back
    dead.reap()
    take(table, 1, generation=2)
    assert sorted((row.generation, row.slot) for row in board.rows()) == [(1, 0), (1, 1), (2, 0)]


def test_rows_of_the_own_generation_outlive_all_its_workers(table: SlotTable) -> None:
    first, second = FakeWorker(), FakeWorker()
    table.take(first, 1)
    table.take(second, 1).failures = 7
    first.reap()
    second.reap()
    assert [table.take(FakeWorker(), 1).failures for _ in range(2)] == [0, 7]


def test_reloads_without_end_do_not_fill_the_scoreboard(table: SlotTable, board: Scoreboard) -> None:
    old = FakeWorker()
    table.take(old, 1)
    for generation in range(2, CAPACITY + 10):
        new = FakeWorker()
        table.take(new, generation)
        old.reap()
        old = new
    assert len(list(board.rows())) == 2


@pytest.mark.parametrize("seed", range(5))
def test_no_two_live_workers_of_a_generation_share_a_slot(table: SlotTable, board: Scoreboard, seed: int) -> None:
    chance = random.Random(seed)
    generation = 1
    live: dict[FakeWorker, tuple[int, int]] = {}
    for _ in range(1000):
        step = chance.random()
        if step < 0.5 or not live:
            worker = FakeWorker()
            row = table.take(worker, generation)
            assert row.generation == generation
            live[worker] = (row.generation, row.slot)
        elif step < 0.98:
            worker = chance.choice(list(live))
            worker.reap()
            del live[worker]
        else:
            generation += 1
        assert len(set(live.values())) == len(live)
        rows = [(row.generation, row.slot) for row in board.rows()]
        assert len(set(rows)) == len(rows)
        assert set(live.values()) <= set(rows)


@pytest.mark.parametrize("seed", range(5))
def test_refilled_after_reaping_the_slots_are_0_to_n(table: SlotTable, seed: int) -> None:
    chance = random.Random(seed)
    number = chance.randint(1, 12)
    live: dict[FakeWorker, int] = {}
    for _ in range(1000):
        for worker in chance.sample(list(live), chance.randint(0, len(live))):
            worker.reap()
            del live[worker]
        while len(live) < number:
            worker = FakeWorker()
            live[worker] = table.take(worker, 1).slot
        assert sorted(live.values()) == list(range(number))
