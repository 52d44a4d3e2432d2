"""The old names of tensor types, ``torch.cuda.FloatTensor`` and its like, in code of before 2018 and its heirs."""

from __future__ import annotations

from typing import Any

import torch

from gpuworker.patches import Patches
from gpuworker.standin import marks
from gpuworker.standin.redirect import CUDA, Redirect

_torch: Any = torch
_Base: Any = _torch._C.TensorBase
_KINDS = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_PREFIX = "torch.cuda."


class _CudaTensorType(type):
    """Stands for a type such as ``torch.cuda.FloatTensor``: made by calling it, and asked by ``isinstance``."""

    cpu_type: Any
    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("device", None)
        made: torch.Tensor = cls.cpu_type(*args, **kwargs)
        return made.cuda()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.dtype and marks.is_marked(instance)


def patch(redirect: Redirect, patches: Patches) -> None:
    """Put the stand-ins in place."""
    types = {}
    for name in (f"{kind}Tensor" for kind in _KINDS):
        cpu_type = getattr(torch, name)
        attributes = {"cpu_type": cpu_type, "dtype": cpu_type.dtype, "is_cuda": True, "__module__": "torch.cuda"}
        types[_PREFIX + name] = _CudaTensorType(name, (), attributes)
        patches.put(torch.cuda, name, types[_PREFIX + name])

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = _Base.type(self)
            return name.replace("torch.", _PREFIX) if marks.is_marked(self) else name
        wanted = types.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if isinstance(wanted, _CudaTensorType):
            return self.to(CUDA, wanted.dtype, non_blocking)
        moved = self.cpu() if marks.is_marked(self) and not isinstance(wanted, torch.dtype) else self
        return _Base.type(moved, wanted, non_blocking, **kwargs)

    def set_default_tensor_type(wanted: Any) -> None:
        wanted = types.get(wanted, wanted) if isinstance(wanted, str) else wanted
        if isinstance(wanted, _CudaTensorType):
            torch.set_default_dtype(wanted.dtype)
            torch.set_default_device(CUDA)
        else:
            original(wanted)

    original: Any = torch.set_default_tensor_type
    patches.put(torch.Tensor, "type", type_)
    patches.put(torch, "set_default_tensor_type", set_default_tensor_type)
