"""Replaces attributes of other packages for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that were replaced, to be put back all at once."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def put(self, owner: Any, name: str, replacement: object) -> None:
        """Replace an attribute of a module or class; nothing happens where there is none of that name."""
        if not hasattr(owner, name):
            return  # another version than those known
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, replacement)
        self.on_removal(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))

    def on_removal(self, undo: Callable[[], None]) -> None:
        """Have `undo` called by :meth:`remove`."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            self._undo.pop()()
