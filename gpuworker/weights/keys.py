"""Which object is the same: what one worker loads and another may attach."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import gpuworker
from gpuworker.arbiter.devices import Device
from gpuworker.weights.arena import Arena
from gpuworker.weights.locks import Lock, Locks
from gpuworker.weights.store import Entry, Store


class ShareError(Exception):
    """An object cannot be shared as asked. The message says why and what to do.

    Not a RuntimeError: werkzeug's proxies take one as the sign that they are not bound, and ``bool()`` of it is False.
    """


@dataclass(frozen=True)
class Session:
    """What a worker needs to share objects.

    :param living_generations: those that workers live of, or would be started of.
    :param timed: counts a part of the boot.
    :param restart_clock: restarts the clock of the load's deadline.
    :param make_room: called before a load; returns when there is as much memory as there will be.
    :param reloading: under ``--reload`` every worker runs newer code than the last one.
    """

    device: Device
    generation: int
    living_generations: Callable[[], set[int]]
    store: Store
    locks: Locks
    arena: Arena
    log: Any
    timed: Callable[[str], AbstractContextManager[None]]
    restart_clock: Callable[[], None]
    make_room: Callable[[], None]
    reloading: bool

    @contextmanager
    def load_lock(self, name: str) -> Iterator[None]:
        """Held by the worker that loads object `name`. To wait for it is not to load: each has the whole deadline."""
        lock = self.locks.lock(f"load:{self.device}:{name}")
        while not lock.acquire(timeout=1.0):
            self.restart_clock()
        try:
            self.restart_clock()
            yield
        finally:
            lock.release()

    def store_lock(self) -> Lock:
        """Held by whoever changes the store."""
        return self.locks.lock(f"store:{self.device}")


@dataclass(frozen=True)
class Spec:
    """One call of :func:`share`.

    :param of_arbiter: it is made from what this arbiter has in its memory, and the same as long as that lives.
    """

    loader: Callable[[], Any]
    name: str
    files: tuple[str, ...]
    version: Any
    mutable: bool
    private: tuple[str, ...]
    warmup: Callable[[Any], object] | None
    of_arbiter: bool = False


@dataclass(frozen=True)
class Key:
    """What must be equal for two calls to mean the same object.

    Within a generation the `identity` will do, so that a file that changes under a running server does not give workers
    that replace crashed ones other weights than their siblings. From one generation to the next, and from one
    process to the next under ``--reload``, an object is kept if its `stamp`, of files and version, stays the same.

    :ivar lasting: whether that goes for the workers of another arbiter, too (USR2, restart of the service). Not for
        what is mutable: its lock is of one arbiter, and old and new code would write to it at the same time.
    """

    identity: str
    stamp: str
    lasting: bool = False

    @property
    def text(self) -> str:
        """As the store keeps it."""
        return self.identity + self.stamp

    def fits(self, entry: Entry, generation: int | None) -> bool:
        """Whether a worker of `generation` (None: one that keeps only what lasts) may attach to `entry`."""
        same_object = entry.key.startswith(self.identity)
        return same_object and (entry.generation == generation or entry.key == self.text)


def key_of(session: Session, spec: Spec) -> Key:
    """The key of what `spec` would load now.

    :raises ShareError: if one of its files cannot be read.
    """
    version = spec.version() if callable(spec.version) else spec.version
    identity = _digest(spec.name, source_of(spec.loader), spec.mutable, spec.private, *_versions())
    if spec.files or version is not None:
        stamp = _digest([stamp_of(path) for path in spec.files], repr(version))
        return Key(identity, stamp, lasting=not spec.mutable)
    # Objects without a stamp of their own must still differ from each other in the store.
    own = session.generation, os.getpid() if session.reloading else 0
    return Key(identity, _digest("of this arbiter" if spec.of_arbiter else own))


def _versions() -> tuple[object, ...]:
    """Of what reads and writes the stored form of an object."""
    return torch.__version__, gpuworker.__version__, sys.version_info[:2]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def source_of(loader: Callable[[], Any]) -> str:
    """What tells one loader from another: its source, or its code where that cannot be had."""
    try:
        return inspect.getsource(loader)
    except (OSError, TypeError):
        code = getattr(loader, "__code__", None)
        return code.co_code.hex() if code else repr(type(loader))


def stamp_of(path: str) -> tuple[str, int, int, int]:
    """Real path, inode, size in bytes and time of the last change in nanoseconds.

    :raises ShareError: if the file cannot be read.
    """
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError as error:
        raise ShareError(f"share(files=…): {path!r} cannot be read: {error.strerror}.") from error
    return real, status.st_ino, status.st_size, status.st_mtime_ns
