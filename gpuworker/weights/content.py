"""Loads an object into arenas, for the first worker of a device, and attaches to them, for all."""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpuworker.cpus import granted_cpus
from gpuworker.weights import staging
from gpuworker.weights.arena import Layout, lay_out, slices
from gpuworker.weights.cpu import CpuArena
from gpuworker.weights.keys import Key, Session, ShareError, Spec, stamp_of
from gpuworker.weights.packing import Packed, Source, no_collection, pack, unpack
from gpuworker.weights.store import ADOPTED, Entry


@dataclass(frozen=True)
class _Content:
    """What the index memfd of an object holds."""

    pickle: bytes
    on_cpu: tuple[bool, ...]
    layouts: tuple[Layout, Layout]
    source_files: tuple[tuple[str, int, int, int], ...]


def load(session: Session, spec: Spec, key: Key) -> None:
    """Call the loader and publish what it returns. The caller holds the lock of the object.

    :raises PackingError: for an object that cannot be passed to another process.
    :raises ArenaError: if there is not enough memory.
    :raises StoreError: if the kernel parks no more descriptors.
    """
    start = time.monotonic()
    loaded = spec.loader()
    if isinstance(loaded, torch.nn.Module) and loaded.training:
        session.log.warning("%s is in training mode: its dropout and batch norms change what it answers", spec.name)
    packed = pack(loaded, private=spec.private)
    fds: list[int] = []
    try:
        content = _fill(session, spec, packed, fds)
        sizes = tuple(layout.nbytes for layout in content.layouts)
        entry = Entry(spec.name, key.text, session.generation, sizes, key.lasting)
        # What was adopted may be just what the app shares next; it is dropped when a worker is ready without it.
        alive = session.living_generations() | {ADOPTED}
        with session.store_lock():
            # Under one name only the newest object is of use to workers to come.
            session.store.update(lambda old: old if old.generation in alive and old.name != spec.name else None)
            session.store.publish(entry, fds)
    finally:
        for fd in fds:
            os.close(fd)
    gib = sum(layout.nbytes for layout in content.layouts) / 2**30
    session.log.info("Loaded %s on %s: %.2f GiB in %.2f s", spec.name, session.device, gib, time.monotonic() - start)


def _fill(session: Session, spec: Spec, packed: Packed, fds: list[int]) -> _Content:
    """Make the arenas of `packed` and the index, whose descriptors go to `fds`: index, device, CPU."""
    on_gpu = session.arena.device_type != "cpu"
    on_cpu = tuple(source.on_cpu and on_gpu for source in packed.sources)
    groups = [[s for s, cpu in zip(packed.sources, on_cpu, strict=True) if cpu is group] for group in (False, True)]
    layouts = tuple(lay_out([s.storage.nbytes() for s in g], [s.private for s in g]) for g in groups)
    content = _Content(packed.pickle, on_cpu, (layouts[0], layouts[1]), _source_files(packed))
    fds.append(_sealed_file(pickle.dumps(content)))
    for arena, layout, group in zip((session.arena, CpuArena()), layouts, groups, strict=True):
        if layout.nbytes:
            fd, memory = arena.create(layout.nbytes)
            fds.append(fd)
            _copy(session, spec, group, layout, memory)
            arena.finish(fd, mutable=spec.mutable)
    return content


def _copy(session: Session, spec: Spec, sources: list[Source], layout: Layout, memory: torch.UntypedStorage) -> None:
    def report(done: int, seconds: float) -> None:
        rate = done / seconds / 2**30
        message = "Loading %s on %s: %.1f of %.1f GiB, %.1f GiB/s"
        session.log.info(message, spec.name, session.device, done / 2**30, layout.nbytes / 2**30, rate)

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


def _source_files(packed: Packed) -> tuple[tuple[str, int, int, int], ...]:
    """Stamps of the source files of the classes inside: changed code must not meet old objects."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in packed.modules}
    return tuple(sorted(stamp_of(file) for file in files if file and Path(file).exists()))


def attach(session: Session, spec: Spec, key: Key) -> Any:
    """The object from the store; None if it is not there."""
    generation = None if session.reloading else session.generation
    found = None
    for entry in session.store.entries():
        if key.fits(entry, generation):
            found = session.store.find(entry.key)
    if found is None:
        return None
    entry, fds = found
    try:
        shared = _unpacked(session, spec, fds)
    except Exception as error:
        if entry.generation != ADOPTED:
            raise
        _drop_adopted(session, entry, error)
        return None
    finally:
        for fd in fds:
            os.close(fd)
    if shared is not None and entry.generation < session.generation:
        _keep_for_this_generation(session, entry.key)
    return shared


def _unpacked(session: Session, spec: Spec, fds: list[int]) -> Any:
    """The object; None if the code of a class inside has changed."""
    content = pickle.loads(Path(f"/proc/self/fd/{fds[0]}").read_bytes())
    if any(_changed(stamp) for stamp in content.source_files):
        return None
    with no_collection():
        return unpack(content.pickle, _storages(session, spec, content, fds[1:]))


def _changed(stamp: tuple[str, int, int, int]) -> bool:
    try:
        return stamp_of(stamp[0]) != tuple(stamp)
    except ShareError:
        return True


def _storages(session: Session, spec: Spec, content: _Content, fds: list[int]) -> list[torch.UntypedStorage]:
    mapped: list[list[torch.UntypedStorage]] = []
    remaining = iter(fds)
    for arena, layout in zip((session.arena, CpuArena()), content.layouts, strict=True):
        if layout.nbytes:
            memory = arena.attach(next(remaining), layout.nbytes, mutable=spec.mutable)
            mapped.append(slices(layout, memory, copy_private=not (spec.mutable or arena.copies_on_write)))
        else:
            mapped.append([_nothing(arena.device_type) for _ in layout.places])
    device, cpu = map(iter, mapped)
    return [next(cpu if on_cpu else device) for on_cpu in content.on_cpu]


def _nothing(device_type: str) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=device_type)  # type: ignore[no-untyped-call]


def _drop_adopted(session: Session, entry: Entry, error: Exception) -> None:
    """Whatever is wrong with what another server has left, it must not keep this one from starting, again and again."""
    session.log.warning("%s is loaded anew, that of the last server cannot be used: %r", entry.name, error)
    with session.store_lock():
        session.store.update(lambda old: None if (old.key, old.generation) == (entry.key, ADOPTED) else old)


def _keep_for_this_generation(session: Session, key: str) -> None:
    own = session.generation

    def newer(entry: Entry) -> Entry:
        if entry.key != key or entry.generation >= own:
            return entry
        return replace(entry, generation=own)

    with session.store_lock():
        session.store.update(newer)
