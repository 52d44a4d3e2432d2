"""``gpuworker.share``: one copy of an object's tensors per device, whatever the number of workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, overload

from werkzeug.local import LocalProxy

from gpuworker import placement
from gpuworker.arbiter.guard import guard, line_of_the_app
from gpuworker.arbiter.prefork import Seat
from gpuworker.arbiter.preload import Preloaded
from gpuworker.boot import Boot
from gpuworker.handover import make_room
from gpuworker.weights import preloaded
from gpuworker.weights.arena import Arena
from gpuworker.weights.content import attach, load
from gpuworker.weights.cpu import CpuArena
from gpuworker.weights.cuda import CudaArena
from gpuworker.weights.keys import Session, ShareError, Spec, key_of, source_of
from gpuworker.weights.locks import Lock, Locks
from gpuworker.weights.packing import pack, unpack

T = TypeVar("T")


class _Registry:
    """The shared objects of this process."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.objects: dict[str, Any] = {}
        self.loaders: dict[str, str] = {}
        self.waiting: list[Spec] = []
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
    :param warmup: called with the object in each worker before its first request: for first kernels, ``torch.compile``,
        caches. If it raises, the worker does not start.
    :raises ShareError: for a loader without a name, and for two loaders of one name.
    :raises PackingError: for an object that cannot be passed to another process.
    """
    if loader is None:
        return functools.partial(
            share, name=name, files=files, version=version, mutable=mutable, private=private, warmup=warmup
        )
    paths = tuple(os.fspath(path) for path in files)
    spec = Spec(loader, name or _name_of(loader), paths, version, mutable, tuple(private), warmup)
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


def enter_worker(seat: Seat, log: Any, boot: Boot, *, reloading: bool = False) -> None:
    """Let :func:`share` attach from now on: this process is the worker of `seat`.

    :param reloading: ``--reload``: this worker runs newer code than the last one, so it keeps only what has a version.
    """
    assert seat.device, "a seat without a device has a problem"
    assert seat.store, "so has one without a store"
    assert seat.locks
    arena: Arena = CpuArena() if seat.device.is_cpu else CudaArena()
    _registry.session = Session(
        device=seat.device,
        generation=seat.generation.number,
        living_generations=seat.board.living_generations,
        store=seat.store,
        locks=seat.locks,
        arena=arena,
        log=log,
        timed=boot.timed,
        restart_clock=boot.restart_clock,
        make_room=functools.partial(_make_room, seat, log),
        reloading=reloading,
    )


def _make_room(seat: Seat, log: Any) -> None:
    """Before a load: where the operator asked for it, let the old workers go first, and then their weights."""
    board, generation = seat.board, seat.generation
    if generation.settings.reload != "recreate":
        return
    if board.room_for < generation.number and min(board.living_generations()) < generation.number:
        log.info("The old workers leave before new weights are loaded (GPUWORKER_RELOAD=recreate)")
    make_room(board, generation.number)
    drop_unused()


def bind_proxies() -> None:
    """Attach what a preloaded app shared while the arbiter imported it."""
    assert _registry.session
    waiting, _registry.waiting = _registry.waiting, []
    for spec in waiting:
        _obtain(_registry.session, spec)


def bind_preloaded(content: Preloaded | None) -> None:
    """Give the tensors that a preloaded app put on ``cuda`` their memory on the device of this worker."""
    session = _registry.session
    if session is None or content is None:
        return
    private = ("private.*",) if any(content.private) else ()
    # The arbiter keeps a preloaded app over a HUP, and so its weights stay, too.
    loader = functools.partial(preloaded.contents, content)
    spec = Spec(loader, preloaded.NAME, (), None, mutable=False, private=private, warmup=None, of_arbiter=True)
    preloaded.bind(content, _obtain(session, spec), stand_in=session.arena.device_type == "cpu")
    del _registry.objects[preloaded.NAME]


def drop_unused() -> bool:
    """Drop the weights that no living generation uses, in a worker.

    :returns: whether some are left of an older generation than this worker's: a reason to look again.
    :raises StoreError: see :meth:`gpuworker.weights.store.Store.update`.
    """
    session = _registry.session
    assert session
    alive = session.living_generations()
    entries = session.store.entries()
    if any(entry.generation not in alive for entry in entries):
        with session.store_lock():
            session.store.update(lambda entry: entry if entry.generation in alive else None)
    return any(entry.generation in alive and entry.generation < session.generation for entry in entries)


def _name_of(loader: Callable[[], Any]) -> str:
    name = getattr(loader, "__qualname__", None)
    if not name or "<lambda>" in name:
        raise ShareError(f"share() cannot name {loader!r}, which all workers must know by one name: give it name=.")
    return f"{loader.__module__}.{name}"


def _refuse_second_loader(spec: Spec) -> None:
    source = source_of(spec.loader)
    if _registry.loaders.setdefault(spec.name, source) != source:
        raise ShareError(f"two different loaders share the name {spec.name!r}: give one of them another name=.")


def _proxy(spec: Spec) -> Any:
    """Stands for an object that must not exist yet, while the arbiter imports the app."""
    _registry.waiting.append(spec)

    def bound() -> Any:
        if spec.name not in _registry.objects:
            raise ShareError(
                f"{spec.name} was used while gunicorn's arbiter imports the app, where it does not exist yet:\n"
                f"  {line_of_the_app()}\n"
                "Use it in a request, pass warmup= to share(), or start gunicorn without --preload."
            )
        return _registry.objects[spec.name]

    return LocalProxy(bound)


def _on_device(spec: Spec, loaded: Any) -> Any:
    """Outside a worker: the object where it would be in one."""
    device = placement.device()
    if device.type == "cpu":
        return loaded
    packed = pack(loaded, private=spec.private)
    return unpack(packed.pickle, [s.storage if s.on_cpu else s.storage.to(device=device) for s in packed.sources])


def _remember(spec: Spec, shared: Any) -> Any:
    _registry.objects[spec.name] = shared
    _registry.labels[id(shared)] = f"object:{spec.name}"
    return shared


def _warm(spec: Spec, shared: Any) -> Any:
    if spec.warmup:
        spec.warmup(shared)
    return shared


def _obtain(session: Session, spec: Spec) -> Any:
    if spec.name in _registry.objects:
        return _registry.objects[spec.name]
    with session.timed("weights"):
        key = key_of(session, spec)
        shared = attach(session, spec, key)
        if shared is None:
            # Without the lock: an old worker may be loading, and have to be ready before it leaves.
            session.make_room()
            with session.load_lock(spec.name):
                shared = attach(session, spec, key)
                if shared is None:
                    load(session, spec, key)
                    session.arena.trim()
                    shared = attach(session, spec, key)
                    assert shared is not None
    with session.timed("warm-up") if spec.warmup else nullcontext():
        return _warm(spec, _remember(spec, shared))
