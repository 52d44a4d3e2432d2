"""``gpuworker.share``: one copy of an object's tensors per device, whatever the number of workers."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from werkzeug.local import LocalProxy

from gpuworker import placement
from gpuworker.arbiter.guard import guard
from gpuworker.arbiter.prefork import Seat
from gpuworker.cpus import granted_cpus
from gpuworker.weights import staging
from gpuworker.weights.arena import Arena, Layout, lay_out, slices
from gpuworker.weights.cpu import CpuArena
from gpuworker.weights.cuda import CudaArena
from gpuworker.weights.locks import Lock, Locks
from gpuworker.weights.packing import Packed, Source, pack, unpack
from gpuworker.weights.store import Entry, Store

T = TypeVar("T")


class ShareError(RuntimeError):
    """An object cannot be shared as asked. The message says why and what to do."""


@dataclass(frozen=True)
class _Session:
    """What a worker needs to share objects."""

    seat: Seat
    store: Store
    locks: Locks
    arena: Arena
    log: Any
    timed: Callable[[str], AbstractContextManager[None]]
    reloading: bool


@dataclass(frozen=True)
class _Spec:
    """One call of :func:`share`."""

    loader: Callable[[], Any]
    name: str
    files: tuple[str, ...]
    version: Any
    mutable: bool
    private: tuple[str, ...]
    warmup: Callable[[Any], object] | None


class _Registry:
    """The shared objects of this process."""

    def __init__(self) -> None:
        self.session: _Session | None = None
        self.objects: dict[str, Any] = {}
        self.loaders: dict[str, str] = {}
        self.waiting: list[_Spec] = []
        self.labels: dict[int, str] = {}
        self.locks: Locks | None = None


_registry = _Registry()


@overload
def share(
    loader: Callable[[], T],
    *,
    name: str | None = ...,
    files: Sequence[str | os.PathLike[str]] = ...,
    version: Any = ...,
    mutable: bool = ...,
    private: Sequence[str] = ...,
    warmup: Callable[[T], object] | None = ...,
) -> T: ...


@overload
def share(
    loader: None = ...,
    *,
    name: str | None = ...,
    files: Sequence[str | os.PathLike[str]] = ...,
    version: Any = ...,
    mutable: bool = ...,
    private: Sequence[str] = ...,
    warmup: Callable[[Any], object] | None = ...,
) -> Callable[[Callable[[], T]], T]: ...


def share(
    loader: Callable[[], Any] | None = None,
    *,
    name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    version: Any = None,
    mutable: bool = False,
    private: Sequence[str] = (),
    warmup: Callable[[Any], object] | None = None,
) -> Any:
    """Load an object once for all workers of a device, and return it::

        model = gpuworker.share(load_model)

        @gpuworker.share(files=["weights.safetensors"])
        def model(): ...                            # the name becomes the object

    In a worker the first of a device calls `loader`; its tensors then lie in memory that no process owns, on the
    worker's device, and every worker, the first too, gets a real object over it. In any other process (``flask run``,
    pytest, a notebook) `loader` is called and its result returned, on :func:`gpuworker.device`. While gunicorn's
    arbiter imports the app (``--preload``) a proxy is returned, which every worker binds before its first request.

    Tensors are shared for reading: a write on the CPU stays in the worker that makes it, a write on a GPU faults that
    worker. Small buffers (under 1 MiB) and non-persistent ones are copies, and so is what `private` names.
    ``requires_grad`` is off.

    :param loader: returns any picklable object that holds tensors, on the CPU or on the worker's device.
    :param name: of the object; by default the loader's module and qualified name.
    :param files: paths the object is made from. While they stay the same, the weights outlive a HUP.
    :param version: a value, or a function of no arguments that returns one, which says the same.
    :param mutable: all tensors are writable and common to all workers; see :func:`lock`.
    :param private: patterns (``fnmatch``) of names of tensors that every worker gets a copy of: ``"head.*"``.
    :param warmup: called with the object in each worker before its first request.
    :raises ShareError: for a loader without a name, and for two loaders of one name.
    :raises PackingError: for an object that cannot be passed to another process.
    """
    if loader is None:
        return functools.partial(
            share, name=name, files=files, version=version, mutable=mutable, private=private, warmup=warmup
        )
    paths = tuple(os.fspath(path) for path in files)
    spec = _Spec(loader, name or _name_of(loader), paths, version, mutable, tuple(private), warmup)
    _refuse_second_loader(spec)
    if _registry.session:
        return _obtain(_registry.session, spec)
    if guard.in_arbiter:
        return _proxy(spec)
    return _warm(spec, _remember(spec, _on_device(spec, loader())))


def lock(shared: Any) -> Lock:
    """The lock of an object shared with ``mutable=True``, across processes and threads::

        with gpuworker.lock(counter):
            counter += 1

    The kernel releases it when its holder dies. It is not re-entrant.

    :raises ShareError: if `shared` was not returned by :func:`share`.
    """
    if isinstance(shared, LocalProxy):
        shared = shared._get_current_object()
    label = _registry.labels.get(id(shared))
    if label is None:
        raise ShareError("lock() takes an object that gpuworker.share() returned, not a part or a copy of one.")
    if _registry.session:
        return _registry.session.locks.lock(label)
    _registry.locks = _registry.locks or Locks()
    return _registry.locks.lock(label)


def enter_worker(
    seat: Seat, log: Any, timed: Callable[[str], AbstractContextManager[None]], *, reloading: bool = False
) -> None:
    """Let :func:`share` attach from now on: this process is the worker of `seat`.

    :param reloading: ``--reload``: this worker runs newer code than the last one, so it keeps only what has a version.
    """
    assert seat.device, "a seat without a device has a problem"
    assert seat.store, "so has one without a store"
    assert seat.locks
    arena: Arena = CpuArena() if seat.device.is_cpu else CudaArena()
    _registry.session = _Session(seat, seat.store, seat.locks, arena, log, timed, reloading)


def bind_proxies() -> None:
    """Attach what a preloaded app shared while the arbiter imported it."""
    assert _registry.session
    waiting, _registry.waiting = _registry.waiting, []
    for spec in waiting:
        _obtain(_registry.session, spec)


def drop_unused() -> bool:
    """Drop the weights that no living generation uses, in a worker.

    :returns: whether some are left of a generation that is not the newest: a reason to look again.
    :raises StoreError: see :meth:`gpuworker.weights.store.Store.update`.
    """
    session = _registry.session
    assert session
    board = session.seat.board
    alive = board.living_generations()
    entries = session.store.entries()
    if any(entry.generation not in alive for entry in entries):
        with _store_lock(session):
            session.store.update(lambda entry: entry if entry.generation in alive else None)
    return any(entry.generation in alive and entry.generation < board.newest_generation for entry in entries)


def _name_of(loader: Callable[[], Any]) -> str:
    name = getattr(loader, "__qualname__", None)
    if not name or "<lambda>" in name:
        raise ShareError(f"share() cannot name {loader!r}, which all workers must know by one name: give it name=.")
    return f"{loader.__module__}.{name}"


def _refuse_second_loader(spec: _Spec) -> None:
    source = _source_of(spec.loader)
    if _registry.loaders.setdefault(spec.name, source) != source:
        raise ShareError(f"two different loaders share the name {spec.name!r}: give one of them another name=.")


def _proxy(spec: _Spec) -> Any:
    """Stands for an object that must not exist yet, while the arbiter imports the app."""
    _registry.waiting.append(spec)

    def bound() -> Any:
        if spec.name not in _registry.objects:
            line = traceback.extract_stack(sys._getframe(2), 1)[0]
            raise ShareError(
                f"{spec.name} was used while gunicorn's arbiter imports the app, where it does not exist yet:\n"
                f'  File "{line.filename}", line {line.lineno}: {line.line}\n'
                "Use it in a request, pass warmup= to share(), or start gunicorn without --preload."
            )
        return _registry.objects[spec.name]

    return LocalProxy(bound)


def _on_device(spec: _Spec, loaded: Any) -> Any:
    """Outside a worker: the object where it would be in one."""
    device = placement.device()
    if device.type == "cpu":
        return loaded
    packed = pack(loaded, private=spec.private)
    return unpack(packed.pickle, [s.storage if s.on_cpu else s.storage.to(device=device) for s in packed.sources])


def _remember(spec: _Spec, shared: Any) -> Any:
    _registry.objects[spec.name] = shared
    _registry.labels[id(shared)] = f"object:{spec.name}"
    return shared


def _warm(spec: _Spec, shared: Any) -> Any:
    if spec.warmup:
        spec.warmup(shared)
    return shared


def _obtain(session: _Session, spec: _Spec) -> Any:
    if spec.name in _registry.objects:
        return _registry.objects[spec.name]
    with session.timed("weights"):
        key = _key_of(session, spec)
        shared = _attach(session, spec, key)
        if shared is None:
            with session.locks.lock(f"load:{session.seat.device}:{spec.name}"):
                shared = _attach(session, spec, key)
                if shared is None:
                    _load(session, spec, key)
                    session.arena.trim()
                    shared = _attach(session, spec, key)
                    assert shared is not None
        return _warm(spec, _remember(spec, shared))


@dataclass(frozen=True)
class _Key:
    """What must be equal for two calls to mean the same object.

    Within a generation the `identity` will do, so that a file that changes under a running server does not give workers
    that replace crashed ones other weights than their siblings. From one generation to the next, and from one
    process to the next under ``--reload``, an object is kept if its `stamp`, of files and version, stays the same.
    """

    identity: str
    stamp: str
    lasting: bool

    @property
    def text(self) -> str:
        return self.identity + self.stamp

    def fits(self, entry: Entry, generation: int | None) -> bool:
        same_object = entry.key.startswith(self.identity)
        return same_object and (entry.generation == generation or (self.lasting and entry.key == self.text))


def _key_of(session: _Session, spec: _Spec) -> _Key:
    version = spec.version() if callable(spec.version) else spec.version
    identity = _digest(spec.name, _source_of(spec.loader), spec.mutable, spec.private, torch.__version__)
    # Objects without a stamp of their own must still differ from each other in the store.
    own = session.seat.generation.number, os.getpid() if session.reloading else 0
    lasting = bool(spec.files) or version is not None
    stamp = _digest([_stamp(path) for path in spec.files], repr(version)) if lasting else _digest(own)
    return _Key(identity, stamp, lasting)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _source_of(loader: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(loader)
    except (OSError, TypeError):
        code = getattr(loader, "__code__", None)
        return code.co_code.hex() if code else repr(type(loader))


def _stamp(path: str) -> tuple[str, int, int, int]:
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError as error:
        raise ShareError(f"share(files=…): {path!r} cannot be read: {error.strerror}.") from error
    return real, status.st_ino, status.st_size, status.st_mtime_ns


# Loading. Two arenas at most: one on the device, one for what stays on the CPU beside it.


@dataclass(frozen=True)
class _Content:
    """What the index memfd of an object holds."""

    pickle: bytes
    on_cpu: tuple[bool, ...]
    layouts: tuple[Layout, Layout]
    classes: tuple[tuple[str, int, int, int], ...]


def _load(session: _Session, spec: _Spec, key: _Key) -> None:
    start = time.monotonic()
    loaded = spec.loader()
    if isinstance(loaded, torch.nn.Module) and loaded.training:
        session.log.warning("%s is in training mode: its dropout and batch norms change what it answers", spec.name)
    packed = pack(loaded, private=spec.private)
    loaded_at = time.monotonic()
    classes = _class_files(loaded)
    fds: list[int] = []
    try:
        content = _fill(session, spec, packed, classes, fds)
        entry = Entry(
            spec.name, key.text, session.seat.generation.number, tuple(layout.nbytes for layout in content.layouts)
        )
        alive = session.seat.board.living_generations()
        with _store_lock(session):
            # Under one name only the newest object is of use to workers to come.
            session.store.update(lambda old: old if old.generation in alive and old.name != spec.name else None)
            session.store.publish(entry, fds)
    finally:
        for fd in fds:
            os.close(fd)
    gib = sum(layout.nbytes for layout in content.layouts) / 2**30
    took, copied = time.monotonic() - start, time.monotonic() - loaded_at
    message = "Loaded %s on %s: %.2f GiB in %.2f s, of which copying took %.2f s (%.1f GiB/s)"
    session.log.info(message, spec.name, session.seat.device, gib, took, copied, gib / copied)


def _fill(
    session: _Session, spec: _Spec, packed: Packed, classes: tuple[tuple[str, int, int, int], ...], fds: list[int]
) -> _Content:
    """Make the arenas of `packed` and the index, whose descriptors go to `fds`: index, device, CPU."""
    cpu_device = isinstance(session.arena, CpuArena)
    on_cpu = tuple(source.on_cpu and not cpu_device for source in packed.sources)
    groups = [[s for s, cpu in zip(packed.sources, on_cpu, strict=True) if cpu is group] for group in (False, True)]
    layouts = tuple(lay_out([s.storage.nbytes() for s in g], [s.private for s in g]) for g in groups)
    content = _Content(packed.pickle, on_cpu, (layouts[0], layouts[1]), classes)
    fds.append(_sealed_file(pickle.dumps(content)))
    for arena, layout, group in zip((session.arena, CpuArena()), layouts, groups, strict=True):
        if layout.nbytes:
            fd, memory = arena.create(layout.nbytes)
            fds.append(fd)
            _copy(session, spec, group, layout, memory)
            arena.finish(fd, mutable=spec.mutable)
    return content


def _copy(session: _Session, spec: _Spec, sources: list[Source], layout: Layout, memory: torch.UntypedStorage) -> None:
    def report(done: int, seconds: float) -> None:
        rate = done / seconds / 2**30
        message = "Loading %s on %s: %.1f of %.1f GiB, %.1f GiB/s"
        session.log.info(message, spec.name, session.seat.device, done / 2**30, layout.nbytes / 2**30, rate)

    places = (memory[offset : offset + size] for offset, size in layout.places)
    threads = torch.get_num_threads()
    torch.set_num_threads(granted_cpus())  # the other workers wait for this one
    try:
        staging.copy(zip((source.storage for source in sources), places, strict=True), report)
    finally:
        torch.set_num_threads(threads)


def _sealed_file(data: bytes) -> int:
    arena = CpuArena()
    fd, memory = arena.create(len(data))
    memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage(), False)
    arena.finish(fd, mutable=False)
    return fd


def _class_files(loaded: Any) -> tuple[tuple[str, int, int, int], ...]:
    """Stamps of the source files of the classes of a module's parts: changed code must not meet old objects."""
    if not isinstance(loaded, torch.nn.Module):
        return ()
    modules = {type(module).__module__ for module in loaded.modules()}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return tuple(sorted(_stamp(file) for file in files if file and Path(file).exists()))


# Attaching


def _attach(session: _Session, spec: _Spec, key: _Key) -> Any:
    """The object from the store; None if it is not there."""
    generation = None if session.reloading else session.seat.generation.number
    found = None
    for entry in session.store.entries():
        if key.fits(entry, generation):
            found = session.store.find(entry.key)
    if found is None:
        return None
    entry, fds = found
    try:
        content = pickle.loads(Path(f"/proc/self/fd/{fds[0]}").read_bytes())
        if any(_changed(stamp) for stamp in content.classes):
            return None
        storages = _storages(session, spec, content, fds[1:])
    finally:
        for fd in fds:
            os.close(fd)
    if entry.generation < session.seat.generation.number:
        _keep_for_this_generation(session, entry.key)
    return unpack(content.pickle, storages)


def _changed(stamp: tuple[str, int, int, int]) -> bool:
    try:
        return _stamp(stamp[0]) != tuple(stamp)
    except ShareError:
        return True


def _storages(session: _Session, spec: _Spec, content: _Content, fds: list[int]) -> list[torch.UntypedStorage]:
    mapped: list[list[torch.UntypedStorage]] = []
    remaining = iter(fds)
    for arena, layout in zip((session.arena, CpuArena()), content.layouts, strict=True):
        if layout.nbytes:
            memory = arena.attach(next(remaining), layout.nbytes, mutable=spec.mutable)
            # On the CPU a private mapping is a copy already, made page by page when it is written to.
            mapped.append(slices(layout, memory, copy_private=not (spec.mutable or isinstance(arena, CpuArena))))
        else:
            mapped.append([_nothing(arena) for _ in layout.places])
    device, cpu = map(iter, mapped)
    return [next(cpu if on_cpu else device) for on_cpu in content.on_cpu]


def _nothing(arena: Arena) -> torch.UntypedStorage:
    device = "cpu" if isinstance(arena, CpuArena) else "cuda"
    return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()


def _keep_for_this_generation(session: _Session, key: str) -> None:
    own = session.seat.generation.number

    def newer(entry: Entry) -> Entry:
        if entry.key != key or entry.generation >= own:
            return entry
        return Entry(entry.name, entry.key, own, entry.sizes)

    with _store_lock(session):
        session.store.update(newer)


def _store_lock(session: _Session) -> Lock:
    device = session.seat.device
    return session.locks.lock(f"store:{device and device.index}")
