"""Keeps on the CPU what the app puts on ``cuda``, and lets it believe otherwise.

Two uses: in gunicorn's arbiter while it imports the app (``--preload``), where CUDA must not start; and in workers on
CPU devices, as a stand-in for development. Nothing happens until the app first names ``cuda``. From then on a
``TorchDispatchMode`` turns every operation on ``cuda`` into one on the CPU and marks what comes out; what is computed
from marked tensors is marked, as torch's own ``FakeTensorMode`` derives the device of a result. Attributes and calls
that do not pass torch's dispatcher are patched.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from gpuworker.patches import Patches
from gpuworker.standin import marks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

_torch: Any = torch
_aten: Any = torch.ops.aten
#: Operations that copy from one device to another.
_COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::_copy_from", "aten::_copy_from_and_resize")

#: Makes the error for what cannot be honoured.
Refuse = Callable[[str], Exception]
#: Puts patches in place.
Patcher = Callable[["Redirect", Patches], None]


class Redirect:
    """The redirection of this process; one object, since torch is one module.

    :param at_rest: put in place what notices the first use of ``cuda`` where torch itself would not tell.
    :param in_use: put in place what is needed from then on.
    :ivar in_use: the patches that are in place from the first use of ``cuda`` on; none before.
    :ivar was_used: whether there was such a use, ever.
    """

    def __init__(self, at_rest: Sequence[Patcher], in_use: Sequence[Patcher]) -> None:
        self._patchers = at_rest, in_use
        self._at_rest = Patches()
        self.in_use = Patches()
        self._thread = threading.local()
        self._starting = threading.RLock()
        self._on_first_use: Callable[[], None] = lambda: None
        self._lazy_init: Callable[[], None] = lambda: None
        self.refuse: Refuse | None = None
        self.origin: marks.Origin = str
        self.was_used = False

    def install(
        self, *, on_first_use: Callable[[], None] = lambda: None, refuse: Refuse | None, origin: marks.Origin = str
    ) -> None:
        """Watch for the first use of ``cuda``; a second call changes nothing.

        :param on_first_use: called at the first use.
        :param refuse: makes the error for what cannot be honoured before a fork; None in a worker.
        :param origin: tells which line of the app is being run.
        """
        if self._at_rest:
            return
        self._on_first_use, self.refuse, self.origin = on_first_use, refuse, origin
        self._lazy_init = torch.cuda._lazy_init
        self._at_rest.put(torch.cuda, "_lazy_init", self._init_for_an_operation)
        for patch in self._patchers[0]:
            patch(self, self._at_rest)

    def use(self) -> None:
        """Redirect from now on, in this thread and in those that it starts."""
        with self._starting:
            if not self.in_use:
                self.was_used = True
                self._patch_threads()
                self._catch_other_threads()
                for patch in self._patchers[1]:
                    patch(self, self.in_use)
                self._on_first_use()
        self.enter_thread()

    def enter_thread(self) -> None:
        """Redirect in this thread too, if the redirection is in use: torch has a stack of modes for each."""
        if self.in_use and not hasattr(self._thread, "entered"):
            self._thread.entered = _Entered(_Mode(self))

    def remove(self) -> None:
        """Undo everything, in the thread that was the first to use it. The marks stay."""
        vars(self._thread).pop("entered", None)
        self.in_use.remove()
        self._at_rest.remove()

    def mark(self, result: Any) -> Any:
        """Remember every tensor in `result` as one on the GPU."""
        for tensor in _tensors(result):
            marks.mark(tensor, self.origin())
        return result

    def wants_cuda(self, device: Any) -> bool:
        """Whether `device`, in any form in which torch takes one, is the GPU; if so the redirection is in use.

        :raises RuntimeError: for a GPU that a worker does not see.
        """
        if device is None or isinstance(device, torch.Tensor):
            return False
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device(device)
        if device.type != "cuda":
            return False
        if device.index:
            reason = f"{device} is not there, every worker sees one GPU, cuda:0"
            raise self.refuse(reason) if self.refuse else RuntimeError(reason)
        self.use()
        return True

    def _init_for_an_operation(self) -> None:
        # torch calls this from C++ before an operation on CUDA, which then meets the mode.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.cuda"):
            self._lazy_init()  # for torch.cuda's own functions there is nothing to redirect
        else:
            self.use()

    def _patch_threads(self) -> None:
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def bootstrap_redirected(thread: threading.Thread) -> None:
            self.enter_thread()
            bootstrap(thread)

        self.in_use.put(threading.Thread, "_bootstrap_inner", bootstrap_redirected)

    def _catch_other_threads(self) -> None:
        # A thread that ran before the first use has no mode, and torch calls _lazy_init once for all threads. What such
        # a thread makes on CUDA comes here instead, since nearly all factories begin with one of these.
        library = _torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of older versions of torch, that there is one already
            for make in (_aten.empty.memory_format, _aten.empty_strided.default):
                library.impl(make, functools.partial(self._enter_and_make, make), "CUDA")
        self.in_use.on_removal(library._destroy)

    def _enter_and_make(self, make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.enter_thread()
        return make(*args, **kwargs)


class _Mode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns operations on ``cuda`` into operations on the CPU."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or torch would import its compiler to keep it away from this class.
        return False

    def __init__(self, redirect: Redirect) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._redirect = redirect

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and isinstance(func, torch._ops.OpOverload):
            # As autograd does it otherwise. Or Tensor.to() would come here whole, and find that it has nothing to do.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inputs = _tensors((args, kwargs))
        device = kwargs.get("device")
        if device is None:
            on_cuda = any(map(marks.is_marked, inputs))
        else:
            on_cuda = self._redirect.wants_cuda(device)
            kwargs["device"] = CPU if on_cuda else device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is _aten._pin_memory.default:
            func, args, kwargs = _aten.clone.default, args[:1], {}
        result = func(*args, **kwargs)
        if on_cuda:
            self._mark_new(func, result, inputs)
        return result

    def _mark_new(self, func: Any, result: Any, inputs: list[torch.Tensor]) -> None:
        known = {storage._cdata for tensor in inputs for storage in marks.storages_of(tensor)}
        written = _is_written(func) and any(tensor.dim() and marks.is_marked(tensor) for tensor in inputs)
        for tensor in _tensors(result):
            for storage in marks.storages_of(tensor):
                # No GPU computes into memory of the CPU, so what C++ made for such a result is on the GPU too.
                if (storage._cdata not in known or written) and not marks.is_storage_marked(storage):
                    marks.mark_storage(storage, self._redirect.origin())


def _is_written(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return bool(schema is not None and schema.is_mutable and schema.name not in _COPIES)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Entered:
    """A mode in this thread, as long as this object lives, which is thread-local.

    Left to itself, torch drops the mode when Python has joined the thread already, and aborts the process if by then
    the interpreter is ending.
    """

    def __init__(self, mode: _Mode) -> None:
        self._mode, self._thread = mode, threading.get_ident()
        mode.__enter__()  # type: ignore[no-untyped-call]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # After a fork the child's one thread clears up after the others.
        if not is_finalizing() and threading.get_ident() == self._thread:
            _leave(self._mode)


def _leave(mode: _Mode) -> None:
    """Take `mode` from the stack of modes, wherever in it it is."""
    above: list[Any] = []
    while (top := _python_dispatch._pop_mode()) is not mode:
        above.append(top)
    _python_dispatch._push_mode(mode)
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _python_dispatch._push_mode(other)
