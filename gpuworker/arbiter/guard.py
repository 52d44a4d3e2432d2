"""Keeps CUDA and torch's threads from starting in the arbiter, where the workers forked later could not use them.

CUDA cannot be used in a process whose parent started it, and OpenMP hangs a child whose parent ran a parallel region.
So while the arbiter lives, torch is stopped before it starts CUDA, and computes in one thread. A worker undoes all of
it before it imports the app.
"""

from __future__ import annotations

import builtins
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gunicorn
import torch

from gpuworker import driver
from gpuworker.arbiter import devices
from gpuworker.patches import Patches

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
#: Libraries known to start the CUDA driver, to name the likely culprit.
_STARTERS = ("cupy", "jax", "numba.cuda", "onnxruntime", "pycuda", "tensorflow", "tensorrt")
_REMEDY = (
    "Let it run in the workers: load the model with gpuworker.share(), start gunicorn without --preload, or, if the "
    "line is in the config file or a hook, move it into the app or the post_worker_init hook."
)


class CudaInArbiterError(RuntimeError):
    """Something tried to start CUDA in gunicorn's arbiter. The message shows the line and says what to do."""


class Guard:
    """The patches of this process; one object, since torch is one module."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._refusal = ""
        self._started_at = ""
        self._pid = 0
        self._in_worker = False
        self._threads: int | None = None

    def install(self) -> None:
        """Put the patches in place; a second call changes nothing."""
        if self._patches:
            return
        self._pid = os.getpid()
        set_num_threads = torch.set_num_threads
        self._patches.put(torch, "set_num_threads", self._remember_threads)
        if torch.version.cuda:
            self._close_the_ways_to_cuda()
        else:
            self._close(torch.cuda, "_lazy_init")
        self._patches.put(builtins, "__import__", self._watched_import(builtins.__import__))
        self._set_nvml_check()
        set_num_threads(1)

    def _close_the_ways_to_cuda(self) -> None:
        # Nearly all of torch passes through _cuda_init. What does not is refused one by one, and what is missed here
        # shows in the driver: see driver_problem().
        self._close(torch._C, "_cuda_init")
        for way in (torch.cuda.Stream, torch.cuda.ExternalStream, torch.cuda.CUDAGraph):
            self._close(way, "__new__")
        self._close(torch.Tensor, "pin_memory")
        # The autograd engine counts the devices of every backend when it first runs, and so starts the driver.
        for module in (torch.autograd, torch.autograd.graph):
            self._close(module, "_engine_run_backward", harmless=lambda: not _count_devices())
        # These two are asked in passing, the second by every step of an optimizer, and have an answer without CUDA.
        self._patches.put(torch._C, "_cuda_getDeviceCount", _count_devices)
        self._patches.put(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)

    def remove(self) -> None:
        """Undo :meth:`install`, in a worker."""
        self._patches.remove()

    @property
    def threads(self) -> int | None:
        """What the app, imported in the arbiter, last gave to ``torch.set_num_threads``."""
        return self._threads

    @property
    def in_arbiter(self) -> bool:
        """Whether this process is gunicorn's arbiter."""
        return self._pid == os.getpid()

    def enter_worker(self) -> None:
        """Note that this process is a worker, which :meth:`remove` will set free when it has its device."""
        self._in_worker = True

    def take_refusal(self) -> str:
        """The first attempt to start CUDA since this was last asked; empty if there was none.

        The app may have caught the exception and gone on, on the CPU.
        """
        refusal, self._refusal = self._refusal, ""
        return refusal

    def driver_problem(self) -> str:
        """Why no worker can be forked from this process any more; empty if it can."""
        if not driver.is_initialised():
            return ""
        loaded = [name for name in _STARTERS if name in sys.modules]
        hint = f" (of those known to do so, {', '.join(loaded)} is loaded)" if loaded else ""
        where = f", in this line of the app or above it:\n  {self._started_at}\nN" if self._started_at else ": n"
        return (
            "CUDA was started in gunicorn's arbiter by the config file, a hook or a library that one of them or the "
            f"preloaded app imported{hint}{where}o worker forked from it could use a GPU. {_REMEDY}"
        )

    def _watched_import(self, import_: Callable[..., Any]) -> Callable[..., Any]:
        """Looks at the driver around every import that the app's own code makes: libraries start it past torch."""

        def look(filename: str) -> None:
            if not (self._started_at or _is_library(filename)) and self.in_arbiter and driver.is_initialised():
                self._started_at = line_of_the_app()

        def watched(*args: Any, **kwargs: Any) -> Any:
            importer = sys._getframe(1).f_code.co_filename
            look(importer)
            module = import_(*args, **kwargs)
            look(importer)
            return module

        return watched

    def _set_nvml_check(self) -> None:
        # Makes torch.cuda.is_available() ask NVML, which unlike the CUDA runtime leaves the process fit to fork.
        before = os.environ.get(_NVML_CHECK)
        os.environ[_NVML_CHECK] = "1"
        self._patches.on_removal(lambda: _restore_variable(_NVML_CHECK, before))

    def _remember_threads(self, count: int) -> None:
        # Applied in the workers. Here more than one thread would hang their first parallel operation.
        self._threads = count

    def _close(self, owner: Any, name: str, harmless: Callable[[], bool] = lambda: False) -> None:
        """Refuse calls of a function of torch, in the arbiter, unless they are `harmless`."""
        original: Any = getattr(owner, name, None)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._pid and not self._in_worker:
                self.remove()  # some other child of the arbiter, such as gunicorn's dirty workers
            elif not harmless():
                raise self.refusal("CUDA must not start before the fork, no worker could use it")
            return original(*args, **kwargs)

        self._patches.put(owner, name, refuse)

    def refusal(self, reason: str) -> CudaInArbiterError:
        """The error for what cannot be done before the fork. The server will not start, even if the app catches it."""
        line = line_of_the_app()
        if self._in_worker:
            return CudaInArbiterError(
                f"CUDA must not start before the worker has its device:\n  {line}\nDo it in the post_worker_init hook."
            )
        message = f"{reason}:\n  {line}\n{_REMEDY}"
        self._refusal = self._refusal or message
        return CudaInArbiterError(message)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@functools.cache
def _count_devices() -> int:
    """Stands in for the CUDA runtime's count, which torch takes where it cannot use NVML itself (MIG names)."""
    return len(devices.visible_gpus())


def line_of_the_app() -> str:
    """The innermost line on the stack that is the app's own, else the innermost outside torch and this package."""
    place = place_in_the_app(sys._getframe(1))
    if place is None:
        return "(no line of the app)"
    filename, line = place
    return f'File "{filename}", line {line}: {linecache.getline(filename, line).strip()}'


def place_in_the_app(frame: FrameType | None, *, only_own: bool = False) -> tuple[str, int] | None:
    """File and line in the app's own code that `frame` was called from.

    :param only_own: None if there is none, and not that of another library.
    """
    outside = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _is_library(filename):
            return filename, frame.f_lineno
        if outside is None and not filename.startswith(_OURS):
            outside = filename, frame.f_lineno
        frame = frame.f_back
    return None if only_own else outside


def place_of_function(function: object) -> tuple[str, int] | None:
    """File and line of `function`, if it is the app's own."""
    code = getattr(function, "__code__", None)
    return None if code is None or _is_library(code.co_filename) else (code.co_filename, code.co_firstlineno)


_OURS = (*(os.path.dirname(str(module.__file__)) for module in (driver, torch, gunicorn)), "<")
_LIBRARIES = (*_OURS, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")))


@functools.cache
def _is_library(filename: str) -> bool:
    # Packages may also lie outside this environment: of the system, of the user, of an environment below this one.
    return filename.startswith(_LIBRARIES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


guard = Guard()
