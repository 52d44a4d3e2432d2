"""The app imported by the arbiter (``--preload``): what of it belongs on the GPU, found once, before the first fork.

While the app is imported, what it puts on ``cuda`` stays on the CPU, marked (:mod:`gpuworker.standin`). The tensors
found here get their memory from the device in every worker, the very same objects.
"""

from __future__ import annotations

import concurrent.futures.thread
import gc
import multiprocessing.pool
import os
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpuworker.arbiter.guard import guard, line_of_the_app, place_in_the_app, place_of_function
from gpuworker.standin import marks, redirect
from gpuworker.weights.packing import SMALL_BUFFER, flatten, script_tensors
from gpuworker.weights.staging import bytes_of


class PreloadError(RuntimeError):
    """A preloaded app cannot be handed to the workers. The message says what of it and what to do."""


_REMEDY = "Load the model with gpuworker.share(), or start gunicorn without --preload."
#: What the threads of a ``ThreadPoolExecutor`` run.
_POOL_THREAD = concurrent.futures.thread._worker.__code__
#: How far from a module's globals a tensor is looked for, to name it.
_DEPTH = 8


@dataclass(frozen=True)
class Preloaded:
    """What a preloaded app put on the GPU.

    :ivar tensors: every tensor found.
    :ivar storages: their memory, on the CPU of the arbiter.
    :ivar private: for each storage, whether every worker gets a copy, since models write to such tensors.
    """

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    private: list[bool]


_watch = {"over": False}


def watch() -> None:
    """Redirect what the app puts on ``cuda`` from now on, until :func:`finish`; later calls change nothing.

    gunicorn imports a preloaded app once: a HUP brings no other.
    """
    if not _watch["over"]:
        redirect.install(refuse=guard.refusal, origin=line_of_the_app)
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a child that is no worker, for none is forked before :func:`finish`."""
    if not _watch["over"]:
        _watch["over"] = True
        redirect.remove()


def finish(*, app_is_here: bool) -> Preloaded | None:
    """End the redirection, and find what the app put on the GPU.

    :param app_is_here: whether the arbiter imported the app.
    :returns: None if there is nothing.
    :raises PreloadError: for what would be lost by the fork.
    """
    _watch["over"] = True
    was_used = redirect.was_used
    redirect.remove()
    if app_is_here:
        _refuse_threads()
        _renew_pools()
    if not was_used:
        return None
    with _unfrozen():
        gc.collect()
        objects = gc.get_objects()
        modules = [obj for obj in objects if issubclass(type(obj), torch.nn.Module)]
        for module in modules:
            if isinstance(module, torch.nn.RNNBase):
                _lay_out(module)
        tensors = _marked_tensors(objects, modules)
        del objects
        _refuse_what_cannot_move(tensors)
        return _describe(tensors, modules)


def _refuse_threads() -> None:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        place = place_in_the_app(frames.get(thread.ident or 0), only_own=True)
        if isinstance(thread, threading.Timer):
            place = place_of_function(thread.function)
        where = f'File "{place[0]}", line {place[1]}' if place else ""
        if _is_of_a_thread_pool(frames.get(thread.ident or 0)):
            where = "multiprocessing.pool.ThreadPool (a concurrent.futures.ThreadPoolExecutor would do)"
        if where and thread is not threading.main_thread():
            raise PreloadError(
                f"The app started a thread ({thread.name}) that is still running, and would be lost in the workers, "
                f"which are forked now:\n  {where}\n"
                "Start it in the post_worker_init hook or in the first request, or start gunicorn without --preload."
            )


def _is_of_a_thread_pool(frame: types.FrameType | None) -> bool:
    """Whether it belongs to a ``multiprocessing.pool.ThreadPool``, which would wait for it for ever in a worker."""
    code = multiprocessing.pool.worker.__code__  # type: ignore[attr-defined]
    return any(step.f_code is code for step in _frames(frame))


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """`frame` and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _renew_pools() -> None:
    """Let pools of the app start threads anew in the workers, which would wait for idle ones that the fork loses."""
    frames = (frame for innermost in sys._current_frames().values() for frame in _frames(innermost))
    for frame in frames:
        pool = frame.f_locals["executor_reference"]() if frame.f_code is _POOL_THREAD else None
        if pool is not None:
            pool._threads = set()
            pool._idle_semaphore = threading.Semaphore(0)


class _unfrozen:
    """Objects that the app froze (``gc.freeze()``) are seen too."""

    def __enter__(self) -> None:
        self._frozen = gc.get_freeze_count() > 0
        gc.unfreeze()

    def __exit__(self, *exc: object) -> None:
        if self._frozen:
            gc.freeze()


def _lay_out(rnn: torch.nn.RNNBase) -> None:
    if rnn._flat_weights and all(isinstance(w, torch.Tensor) and marks.is_marked(w) for w in rnn._flat_weights):
        with torch.inference_mode(False):
            flatten(rnn)
        for weight in rnn._flat_weights:
            marks.mark(weight)  # type: ignore[arg-type]


def _marked_tensors(objects: list[Any], modules: list[torch.nn.Module]) -> list[torch.Tensor]:
    found = {id(obj): obj for obj in objects if issubclass(type(obj), torch.Tensor) and marks.is_marked(obj)}
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            found.update((id(tensor), tensor) for tensor in script_tensors(module) if marks.is_marked(tensor))
    for tensor in list(found.values()):
        found.update((id(held), held) for held in _held_by(tensor) if marks.is_marked(held))
    return list(found.values())


def _held_by(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that C++ may hold for this one alone."""
    held = (tensor.grad if tensor.is_leaf else None, None if tensor.is_inference() else tensor._base)
    return [other for other in held if other is not None]


def _refuse_what_cannot_move(tensors: list[torch.Tensor]) -> None:
    odd = [tensor for tensor in tensors if _is_of_an_odd_kind(tensor)]
    if odd:
        name, tensor = _named(odd)
        kind = type(tensor).__name__ if tensor.layout is torch.strided else tensor.layout
        raise PreloadError(f"{name} ({kind}) cannot be moved to the GPU after the fork. {_REMEDY}")
    computed = [tensor for tensor in tensors if any(map(marks.is_marked, _saved_by(tensor.grad_fn)))]
    if computed:
        raise PreloadError(
            f"{_named(computed)[0]} was computed with gradients, and autograd keeps tensors for its backward that "
            f"cannot move to the GPU after the fork: compute it under torch.no_grad(), or .detach() it. {_REMEDY}"
        )
    _refuse_what_is_hidden(tensors)


def _refuse_what_is_hidden(tensors: list[torch.Tensor]) -> None:
    seen = {storage._cdata for tensor in tensors for storage in marks.storages_of(tensor)}
    for storage in marks.living_storages():
        if storage._cdata not in seen:
            raise PreloadError(
                f"{storage.nbytes():,} bytes that the app put on the GPU are held by something other than a tensor "
                "that Python knows, and cannot be moved there after the fork. They come from:\n"
                f"  {marks.origin_of(storage)}\n{_REMEDY}"
            )


def _is_of_an_odd_kind(tensor: torch.Tensor) -> bool:
    of_parts = hasattr(tensor, "__tensor_flatten__")
    return of_parts or tensor.is_quantized or tensor.layout not in (torch.strided, torch.sparse_coo)


def _saved_by(function: Any) -> Iterator[torch.Tensor]:
    """What the backward of a computation keeps."""
    todo, seen = [function], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in names:
            yield from _tensors_of(node, name)


def _tensors_of(node: Any, name: str) -> list[torch.Tensor]:
    try:
        value = getattr(node, name)
    except RuntimeError:
        return []  # freed by a backward
    values = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in values if isinstance(part, torch.Tensor)]


def _describe(tensors: list[torch.Tensor], modules: list[torch.nn.Module]) -> Preloaded:
    storages = {s._cdata: s for tensor in tensors for s in marks.storages_of(tensor)}
    parameters = {s._cdata for tensor in _parameters(tensors, modules) for s in marks.storages_of(tensor)}
    transient = {s._cdata for buffer in _transient_buffers(modules) for s in marks.storages_of(buffer)}
    private = [key in transient or (key not in parameters and _is_written_to(s)) for key, s in storages.items()]
    return Preloaded(tensors, list(storages.values()), private)


def _parameters(tensors: list[torch.Tensor], modules: list[torch.nn.Module]) -> Iterator[torch.Tensor]:
    yield from (tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter))
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.parameters(recurse=False)


def _transient_buffers(modules: list[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for name in getattr(module, "_non_persistent_buffers_set", ()):
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield buffer


def _is_written_to(storage: torch.UntypedStorage) -> bool:
    """Whether what is no parameter may be a place to write to: small, or large and still empty, such as a cache."""
    return storage.nbytes() < SMALL_BUFFER or not bytes_of(storage).any()


def _named(tensors: list[torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The first of `tensors` that the app has a name for, and that name."""
    for tensor in tensors:
        if way := _way_to(tensor):
            return way, tensor
    first = tensors[0]
    origin = marks.origin_of(marks.storages_of(first)[0])
    return f"A tensor of size {tuple(first.size())}, from {origin},", first


def _way_to(tensor: torch.Tensor) -> str:
    """The way to `tensor` from the globals of a module, as one writes it; empty if it is too far."""
    level: list[tuple[object, str]] = [(tensor, "")]
    seen = {id(tensor), id(level)}
    for _ in range(_DEPTH):
        above: list[tuple[object, str]] = []
        seen.update((id(level), id(above)))
        for obj, way in level:
            for holder in gc.get_referrers(obj):
                step = None if isinstance(holder, types.FrameType) else _step(holder, obj)
                if id(holder) in seen or step is None:
                    continue
                seen.add(id(holder))
                if name := _module_of_globals(holder):
                    return f"{name}{step}{way}"
                above.append((holder, step + way))
        level = above
    return ""


def _module_of_globals(holder: object) -> str:
    name = holder.get("__name__") if isinstance(holder, dict) else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return str(name) if module is not None and vars(module) is holder else ""


def _step(holder: object, obj: object) -> str | None:
    """How `obj` is reached from `holder`."""
    attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    key = next((key for key, value in list(attributes.items()) if value is obj), None)
    if key is not None:
        return "" if key in ("_parameters", "_buffers", "_modules", "__dict__") else f".{key}"
    if isinstance(holder, (list, tuple)):
        index = next((index for index, value in enumerate(holder) if value is obj), None)
        return None if index is None else f"[{index}]"
    return ""
