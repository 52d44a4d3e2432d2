"""Methods and attributes of tensors that do not pass torch's dispatcher, or pass it too late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext

from gpuworker.patches import Patches
from gpuworker.standin import marks
from gpuworker.standin.redirect import CPU, CUDA, Redirect

_torch: Any = torch
_Base: Any = _torch._C.TensorBase
_builtins: Any = _torch.jit._builtins
_overrides: Any = _torch.overrides
_device_module: Any = _torch.utils._device
_LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
#: They copy from the CPU to the device inside C++, where no mode sees it.
_FACTORIES = ("tensor", "as_tensor", "asarray", *(f"sparse_{layout}_tensor" for layout in _LAYOUTS))
#: They may be told to pin their memory, for which C++ starts CUDA before any mode sees it.
_PINNED = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "rand", "randn")
_MOVES = ("device", "dtype", "non_blocking", "copy")


def patch_moves(redirect: Redirect, patches: Patches) -> None:
    """What brings a tensor to a device."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, rest = _parse_to(args, kwargs)
        if device is None:
            return _Base.to(self, *args, **kwargs)  # type: ignore[no-any-return]
        return _move(redirect, self, device, rest)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        return _move(redirect, self, CUDA if device is None else device, {"non_blocking": non_blocking, **kwargs})

    def new_tensor(self: torch.Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        device = CUDA if device is None and marks.is_marked(self) else device
        return _on(redirect, device, functools.partial(_Base.new_tensor, self, data), kwargs)

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = _Base.new(self, *args, **kwargs)
        return redirect.mark(made) if marks.is_marked(self) else made

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self.clone()  # what is pinned would be so for CUDA's sake only

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.to(other)

    for replacement in (to, cuda, new_tensor, new, pin_memory, type_as):
        patches.put(
            torch.Tensor, replacement.__name__, functools.wraps(getattr(_Base, replacement.__name__))(replacement)
        )
    _device_module._device_constructors()  # remembers these functions, and must not remember ours
    for name in _FACTORIES:
        _put_function(patches, name, _factory(redirect, getattr(torch, name)))
    for name in _PINNED:
        _put_function(patches, name, _unpinned(getattr(torch, name)))


def _put_function(patches: Patches, name: str, replacement: Callable[..., torch.Tensor]) -> None:
    operation = _builtins._find_builtin(getattr(torch, name))
    patches.put(torch, name, replacement)
    if operation:
        _builtins._register_builtin(replacement, operation)  # for TorchScript


def patch_attributes(redirect: Redirect, patches: Patches) -> None:
    """What tells where a tensor is, and what differs between a tensor on the CPU and one on a GPU."""
    marked = marks.is_marked

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _move(redirect, self, CPU, {}) if marked(self) else _Base.cpu(self, *args, **kwargs)

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if force:
            return _Base.numpy(self.detach().cpu().resolve_conj().resolve_neg())
        _refuse_numpy(self)
        return _Base.numpy(self)

    def array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_numpy(self)
        return to_array(self, *args, **kwargs)

    def share_memory(self: torch.Tensor) -> torch.Tensor:
        return self if marked(self) else shared_memory(self)  # nothing to do on a GPU

    to_array, shared_memory = _torch.Tensor.__array__, _torch.Tensor.share_memory_
    for name, on_cuda in (("device", CUDA), ("is_cuda", True), ("is_cpu", False)):
        patches.put(torch.Tensor, name, _property(getattr(_Base, name), on_cuda))
    patches.put(torch.Tensor, "get_device", lambda self: 0 if marked(self) else _Base.get_device(self))
    patches.put(torch.Tensor, "cpu", cpu)
    patches.put(torch.Tensor, "numpy", numpy)
    patches.put(torch.Tensor, "__array__", array)
    patches.put(torch.Tensor, "share_memory_", share_memory)


def _property(original: Any, on_cuda: Any) -> property:
    return property(lambda self: on_cuda if marks.is_marked(self) else original.__get__(self))


def _refuse_numpy(tensor: torch.Tensor) -> None:
    if marks.is_marked(tensor):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first."
        )


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The device that the arguments of ``Tensor.to`` name, None if they name none, and the others by name."""
    rest = dict(kwargs)
    names: tuple[str, ...] = _MOVES
    if args and isinstance(args[0], torch.Tensor):
        rest["other"], args, names = args[0], args[1:], _MOVES[2:]
    elif args and isinstance(args[0], torch.dtype):
        names = _MOVES[1:]
    rest.update(zip(names, args, strict=False))
    other = rest.pop("other", None)
    if other is not None:
        rest |= {"device": CUDA if marks.is_marked(other) else other.device, "dtype": other.dtype}
    return rest.pop("device", None), rest


def _move(redirect: Redirect, tensor: torch.Tensor, device: Any, rest: dict[str, Any]) -> torch.Tensor:
    """``tensor.to(device, **rest)``."""
    if not redirect.wants_cuda(device):
        if marks.is_marked(tensor) and torch.device(device).type == "cpu":
            rest = {**rest, "copy": True}
        return _Base.to(tensor, device, **rest)  # type: ignore[no-any-return]
    if not marks.is_marked(tensor):
        return _Base.to(tensor, CUDA, **rest)  # type: ignore[no-any-return]
    rest.pop("non_blocking", None)
    return _Base.to(tensor, dtype=rest.pop("dtype", None) or tensor.dtype, **rest)  # type: ignore[no-any-return]


def _factory(redirect: Redirect, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None and not (args and isinstance(args[0], torch.Tensor)):
            device = _default_device()
        return _on(redirect, device, functools.partial(original, *args), kwargs)

    return made


def _unpinned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return made


def _default_device() -> torch.device | None:
    """Of ``with torch.device(…)`` or ``torch.set_default_device``."""
    contexts = (
        mode for mode in reversed(_overrides._get_current_function_mode_stack()) if isinstance(mode, DeviceContext)
    )
    return next((context.device for context in contexts), None)


def _on(redirect: Redirect, device: Any, make: Callable[..., torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `make` makes, on `device`."""
    if not redirect.wants_cuda(device):
        return make(**kwargs) if device is None else _unmarked(make(device=device, **kwargs), device)
    kwargs.pop("pin_memory", None)
    grad = kwargs.pop("requires_grad", False)
    made = make(device=CPU, **kwargs).cuda()
    return made.requires_grad_() if grad else made


def _unmarked(made: torch.Tensor, device: Any) -> torch.Tensor:
    return made.to(device) if marks.is_marked(made) else made
