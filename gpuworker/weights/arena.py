"""An arena: all shared bytes of one object on one device, as one file descriptor.

A file descriptor can outlive the process that made it and be passed to another, and the kernel frees what it stands for
with its last holder. That is the whole trick: nothing but the kernel holds the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

#: Bytes: where a storage may start in an arena (what torch's own allocator guarantees on a GPU).
ALIGNMENT = 512


class ArenaError(RuntimeError):
    """An arena cannot be made or mapped. The message says what was needed, what there is and what to do."""


class Arena(Protocol):
    """How one kind of device makes and maps arenas.

    :cvar device_type: as torch names it.
    :cvar copies_on_write: whether a worker that writes to what is not mutable gets a copy of the page.
    """

    device_type: str
    copies_on_write: bool

    def create(self, nbytes: int) -> tuple[int, torch.UntypedStorage]:
        """A new arena of `nbytes` > 0: its descriptor, the caller's to close, and its memory, to be filled.

        :raises ArenaError: if there is not so much memory.
        """

    def finish(self, fd: int, *, mutable: bool) -> None:
        """Called once the arena is filled: from now on nobody may change it, unless it is `mutable`."""

    def attach(self, fd: int, nbytes: int, *, mutable: bool) -> torch.UntypedStorage:
        """Map an arena made by another process. The descriptor stays the caller's.

        Writes go to everybody if it is `mutable`; otherwise they hurt, at most, the process that writes.

        :raises ArenaError: if it cannot be mapped.
        """

    def trim(self) -> None:
        """Give memory back that only this process's allocator keeps."""


@dataclass(frozen=True)
class Layout:
    """Where the storages lie in an arena.

    :param nbytes: of the whole arena.
    :param private: where the storages begin that every worker copies; they are the last.
    :param places: (offset, bytes) of each storage.
    """

    nbytes: int
    private: int
    places: tuple[tuple[int, int], ...]


def lay_out(sizes: Sequence[int], private: Sequence[bool]) -> Layout:
    """Place storages of `sizes` bytes one behind the other, the `private` ones together at the end."""
    places = [(0, 0)] * len(sizes)
    end = begin_private = 0
    for is_private in (False, True):
        begin_private = end
        for index, size in enumerate(sizes):
            if private[index] is is_private:
                places[index] = (end, size)
                end += -(-size // ALIGNMENT) * ALIGNMENT
    return Layout(end, begin_private, tuple(places))


def slices(layout: Layout, memory: torch.UntypedStorage, *, copy_private: bool) -> list[torch.UntypedStorage]:
    """The storages of an attached arena; each keeps the whole mapping alive.

    :param copy_private: give this process its own copy of the private ones.
    """
    own = memory
    if copy_private and layout.private < layout.nbytes:
        own = memory[layout.private : layout.nbytes].clone()
    found = []
    for offset, size in layout.places:
        if offset >= layout.private and own is not memory:
            found.append(own[offset - layout.private : offset - layout.private + size])
        else:
            found.append(memory[offset : offset + size])
    return found
