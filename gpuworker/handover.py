"""When an old worker may go that a HUP told to go.

gunicorn sends SIGTERM to the workers of the old generation as soon as those of the new one are forked, ready or not.
Here the old worker of a slot serves on until the new one of that slot is ready, so that a reload with a slow or broken
app costs no request. Where two copies of the weights do not fit, the operator may have it the other way round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gpuworker import process
from gpuworker.status.scoreboard import Row, Scoreboard

#: Seconds between two looks: of an old worker, at whether it may leave; of a new one, at whether the old ones are gone.
POLL = 0.1


def may_leave(own: Row, newest: int, rows: Iterable[Row], alive: Callable[[int], bool] = process.exists) -> bool:
    """Whether the worker of row `own`, once asked to leave, is no longer needed.

    Where `newest`, the number of the newest generation, is its own, it never was: it is a shutdown or a TTOU. Otherwise
    its successor has to have been ready; where there is none alive, any ready worker of a newer generation will do (the
    slot does not exist any more, or gunicorn, which counts the old workers too, forks the successor only after this one
    has left).

    :param alive: whether a process exists; a pid of 0 is a worker about to be forked.
    """
    if newest <= own.generation:
        return True
    newer = _newer(own, rows)
    successors = [row for row in newer if row.slot == own.slot]
    if any(row.times_ready for row in successors):
        return True
    return any(row.times_ready for row in newer) and not any(alive(row.pid) for row in successors)


def reload_failed(own: Row, newest: int, rows: Iterable[Row], alive: Callable[[int], bool] = process.exists) -> bool:
    """Whether the workers of newer generations are all gone, and none of them was ever ready."""
    newer = _newer(own, rows)
    return newest > own.generation and not any(row.times_ready or alive(row.pid) for row in newer)


def make_room(board: Scoreboard, generation: int) -> None:
    """Have all workers of generations older than `generation` leave, and wait until they are gone, and so their memory.

    The kernel takes it back before it lets the arbiter reap a process.
    """
    while any(0 < living < generation for living in board.living_generations()):
        board.room_for = generation
        time.sleep(POLL)


def _newer(own: Row, rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.generation > own.generation]
