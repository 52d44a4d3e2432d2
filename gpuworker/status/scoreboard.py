"""The scoreboard (Apache's term): one shared-memory table in which the workers of a server see each other.

Made in the arbiter before the first fork, as an anonymous shared mapping: it has no name and no descriptor and is gone
with the last process. Every field is an aligned machine word with one writer at a time, so nothing is locked and a
process that is killed while writing leaves nothing half done.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from collections.abc import Iterator

from gpuworker import process

#: Rows that fit. A row is a slot of a generation, and rows of generations without a live worker are used again.
CAPACITY = 4096


class State(enum.IntEnum):
    """What a worker is doing."""

    BOOTING = 0
    LOADING = 1
    READY = 2
    RETRYING = 3


class Row(ctypes.Structure):
    """One slot of one generation; it keeps its counts when one worker follows another in the slot.

    :ivar generation: counted from 1; 0 in a row never used.
    :ivar pid: of the worker; 0 between the preparation in the arbiter and the fork; NOBODY some time after its end.
    :ivar times_ready: how many workers of this slot and generation came to serve.
    :ivar failures: boot failures since one last did.
    :ivar deadline: when loading has to be over, in seconds of the monotonic clock; 0 while none is due.
    :ivar reported: when it was last logged that the device cannot be used, in seconds of the monotonic clock.
    """

    _fields_ = (
        ("generation", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("pid", ctypes.c_int32),
        ("state", ctypes.c_uint32),
        ("times_ready", ctypes.c_uint32),
        ("failures", ctypes.c_uint32),
        ("deadline", ctypes.c_double),
        ("reported", ctypes.c_double),
    )
    generation: int
    slot: int
    pid: int
    state: int
    times_ready: int
    failures: int
    deadline: float
    reported: float


class _Header(ctypes.Structure):
    _fields_ = (
        ("used", ctypes.c_uint32),
        ("newest_generation", ctypes.c_uint32),
        ("ever_ready", ctypes.c_uint32),
        ("stopping", ctypes.c_uint32),
        ("explained", ctypes.c_uint32),
        ("room_for", ctypes.c_uint32),
    )
    used: int
    newest_generation: int
    ever_ready: int
    stopping: int
    explained: int
    room_for: int


class Scoreboard:
    """The table. What is said of the server as a whole is only ever set, so it does not matter who does it first."""

    def __init__(self) -> None:
        room = ctypes.sizeof(_Header) + CAPACITY * ctypes.sizeof(Row) + ctypes.alignment(Row)
        self._memory = mmap.mmap(-1, room)  # pages nobody touches cost nothing
        self._header = _Header.from_buffer(self._memory)
        start = -(-ctypes.sizeof(_Header) // ctypes.alignment(Row)) * ctypes.alignment(Row)
        self._rows = (Row * CAPACITY).from_buffer(self._memory, start)
        # A counter that one process can take to zero, whoever is first.
        self._first = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def newest_generation(self) -> int:
        """The generation that workers started now belong to; set by the arbiter."""
        return self._header.newest_generation

    @newest_generation.setter
    def newest_generation(self, number: int) -> None:
        self._header.newest_generation = number

    @property
    def ever_ready(self) -> bool:
        """Whether any worker of this server ever came to serve."""
        return bool(self._header.ever_ready)

    @property
    def stopping(self) -> bool:
        """Whether the arbiter was told to shut the server down."""
        return bool(self._header.stopping)

    def mark_ever_ready(self) -> None:
        """Note that a worker serves."""
        self._header.ever_ready = 1

    def mark_stopping(self) -> None:
        """Note that the server shuts down; called in a signal handler."""
        self._header.stopping = 1

    @property
    def room_for(self) -> int:
        """The generation that waits for the memory of all older ones; set by its workers."""
        return self._header.room_for

    @room_for.setter
    def room_for(self, generation: int) -> None:
        self._header.room_for = generation

    @property
    def explained(self) -> bool:
        """Whether the log has the traceback of why the server does not start."""
        return bool(self._header.explained)

    def mark_explained(self) -> None:
        """Note that it will have it in a moment."""
        self._header.explained = 1

    def rows(self) -> Iterator[Row]:
        """Every row in use, in no order that means anything."""
        return (self._rows[index] for index in range(self._header.used))

    def living_generations(self) -> set[int]:
        """The generations that a living worker belongs to or a new one would."""
        living = {row.generation for row in self.rows() if process.exists(row.pid)}
        return living | {self.newest_generation}

    def new_row(self) -> Row:
        """A row not in use so far (arbiter only).

        :raises RuntimeError: when the table is full.
        """
        if self._header.used == CAPACITY:
            raise RuntimeError(f"the scoreboard is full: {CAPACITY} workers live at once")
        row: Row = self._rows[self._header.used]
        self._header.used += 1
        return row

    def claim_report(self) -> bool:
        """True for one caller in the life of the server: the process that tells why the server does not start."""
        try:
            os.eventfd_read(self._first)
        except BlockingIOError:
            return False
        return True
