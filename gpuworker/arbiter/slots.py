"""Slots: the number every worker holds from before its fork until it has been reaped.

gunicorn builds the worker object in the arbiter and closes its ``tmp`` when it reaps the process, so an object whose
``tmp`` is open stands for a worker that lives or may live. No hook and no bookkeeping of ours is needed, and a slot is
never given out while its last holder could still use it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from gpuworker.process import NOBODY
from gpuworker.status.scoreboard import Row, Scoreboard


class _Tmp(Protocol):
    def fileno(self) -> int: ...


class Holder(Protocol):
    """What is needed of a gunicorn worker here."""

    tmp: _Tmp


def lowest_free(taken: Collection[int]) -> int:
    """The lowest number from 0 that is not in `taken`."""
    slot = 0
    while slot in taken:
        slot += 1
    return slot


class SlotTable:
    """Who holds which slot, for all generations whose workers still live.

    A HUP starts a generation, whose workers take 0, 1, 2 … again while those of the last one finish their requests.
    """

    def __init__(self, board: Scoreboard) -> None:
        self._board = board
        self._held: list[tuple[Holder, Row]] = []

    def forget_reaped(self) -> list[tuple[Holder, Row]]:
        """The workers that were reaped since this was last asked, and the rows they had."""
        held, self._held = self._held, []
        reaped = []
        for holder, row in held:
            # Asked once: gunicorn 22 and 23 reap in a signal handler, at any moment.
            if _reaped(holder):
                row.pid = NOBODY
                reaped.append((holder, row))
            else:
                self._held.append((holder, row))
        return reaped

    def take(self, worker: Holder, generation: int) -> Row:
        """Give `worker` the lowest slot that no worker of `generation` holds, as a row of the scoreboard."""
        self.forget_reaped()
        slot = lowest_free({row.slot for _, row in self._held if row.generation == generation})
        row = self._row(generation, slot)
        self._held.append((worker, row))
        return row

    def _row(self, generation: int, slot: int) -> Row:
        rows = list(self._board.rows())
        for row in rows:
            if (row.generation, row.slot) == (generation, slot):
                row.pid = 0
                return row
        alive = {row.generation for _, row in self._held}
        row = next((row for row in rows if row.generation not in alive), None) or self._board.new_row()
        # The generation goes first and comes back last: nobody who reads meanwhile takes the old counts for the new.
        row.generation = row.pid = row.state = row.times_ready = row.failures = 0
        row.deadline, row.reported, row.slot = 0.0, 0.0, slot
        row.generation = generation
        return row


def _reaped(worker: Holder) -> bool:
    try:
        worker.tmp.fileno()
    except ValueError:
        return True
    return False
