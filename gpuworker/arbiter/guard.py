"""Keeps CUDA and torch's threads from starting in the arbiter, where the workers forked later could not use them.

CUDA cannot be used in a process whose parent started it, and OpenMP hangs a child whose parent ran a parallel region.
So while the arbiter lives, torch is stopped before it starts CUDA, and computes in one thread. A worker undoes all of
it before it imports the app.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import gunicorn
import torch

from gpuworker import driver
from gpuworker.arbiter import devices

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
#: Libraries known to start the CUDA driver, to name the likely culprit.
_STARTERS = ("cupy", "cuda.bindings", "jax", "numba.cuda", "onnxruntime", "pycuda", "tensorflow", "tensorrt")
_REMEDY = (
    "Let it run in the workers: start gunicorn without --preload, or move it from the config file into the app or the "
    "post_worker_init hook."
)


class CudaInArbiterError(RuntimeError):
    """Something tried to start CUDA in gunicorn's arbiter. The message shows the line and says what to do."""


class Guard:
    """The patches of this process; one object, since torch is one module."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._refusals: list[str] = []
        self._threads: int | None = None
        self._run_backward = torch.autograd.graph._engine_run_backward

    def install(self) -> None:
        """Put the patches in place; a second call changes nothing."""
        if self._undo:
            return
        set_num_threads = torch.set_num_threads
        self._patch(torch, "set_num_threads", self._remember_threads)
        if torch.version.cuda:
            self._close_the_ways_to_cuda()
        else:
            self._patch(torch.cuda, "_lazy_init", self._refuse)
        self._set_nvml_check()
        set_num_threads(1)

    def _close_the_ways_to_cuda(self) -> None:
        # Nearly all of torch passes through _cuda_init. What does not is refused one by one, and what is missed here
        # shows in the driver (see problem()).
        self._patch(torch._C, "_cuda_init", self._refuse)
        for way in (torch.cuda.Stream, torch.cuda.ExternalStream, torch.cuda.CUDAGraph):
            self._patch(way, "__new__", self._refuse)
        self._patch(torch.Tensor, "pin_memory", self._refuse)
        # The autograd engine counts the devices of every backend when it first runs, and so starts the driver.
        self._patch(torch.autograd.graph, "_engine_run_backward", self._backward)
        self._patch(torch.autograd, "_engine_run_backward", self._backward)
        # These two are asked in passing, the second by every step of an optimizer, and have an answer without CUDA.
        self._patch(torch._C, "_cuda_getDeviceCount", _count_devices)
        self._patch(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)

    def remove(self) -> None:
        """Undo :meth:`install`, in a worker."""
        while self._undo:
            self._undo.pop()()

    @property
    def threads(self) -> int | None:
        """What the app, imported in the arbiter, last gave to ``torch.set_num_threads``."""
        return self._threads

    def problem(self) -> str:
        """Why no worker can be forked from this process any more; empty if it can."""
        if self._refusals:
            return self._refusals[0]
        if not driver.is_initialised():
            return ""
        loaded = [name for name in _STARTERS if name in sys.modules]
        hint = f" (of those known to do so, {', '.join(loaded)} is loaded)" if loaded else ""
        return (
            "CUDA was started in gunicorn's arbiter by the config file, a hook or a library that one of them or the "
            f"preloaded app imported{hint}: no worker forked from it could use a GPU. {_REMEDY}"
        )

    def _patch(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original))

    def _set_nvml_check(self) -> None:
        # Makes torch.cuda.is_available() ask NVML, which unlike the CUDA runtime leaves the process fit to fork.
        before = os.environ.get(_NVML_CHECK)
        os.environ[_NVML_CHECK] = "1"
        self._undo.append(lambda: _restore_variable(_NVML_CHECK, before))

    def _remember_threads(self, count: int) -> None:
        # Applied in the workers. Here more than one thread would hang their first parallel operation.
        self._threads = count

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._refuse() if _count_devices() else self._run_backward(*args, **kwargs)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        message = f"CUDA must not start before the fork, no worker could use it:\n  {_line_of_the_app()}\n{_REMEDY}"
        # Remembered too, since the app may catch the exception and go on, on the CPU.
        self._refusals.append(message)
        raise CudaInArbiterError(message)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@functools.cache
def _count_devices() -> int:
    """GPUs by NVML, which the environment makes visible.

    Stands in for the CUDA runtime's count, which torch takes where it cannot use NVML itself (MIG names).
    """
    try:
        found = devices.discover("auto", os.environ).items
    except devices.DeviceError:
        return 0
    return sum(not device.is_cpu for device in found)


def _line_of_the_app() -> str:
    """The innermost line on the stack that is the app's own, else the innermost outside torch and this package."""
    ours = tuple(os.path.dirname(str(path)) for path in (driver.__file__, torch.__file__, gunicorn.__file__))
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts"))
    stack = traceback.extract_stack()
    outside = [frame for frame in stack if not frame.filename.startswith((*ours, "<"))]
    frame = ([frame for frame in outside if not frame.filename.startswith(libraries)] or outside or stack)[-1]
    return f'File "{frame.filename}", line {frame.lineno}: {frame.line}'


guard = Guard()
