"""Files whose tensors go to ``cuda``, and what TorchScript does apart from them."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from gpuworker.patches import Patches
from gpuworker.standin import marks
from gpuworker.standin.redirect import CPU, Redirect
from gpuworker.weights.packing import script_tensors

_torch: Any = torch
#: They write the device of the example, or copies of the weights, into a program.
_BAKING = ("trace", "trace_module", "freeze", "optimize_for_inference")


def patch(redirect: Redirect, patches: Patches) -> None:
    """Redirect storages, ``torch.load`` and ``torch.jit``."""
    _patch_storages(redirect, patches)
    _patch_load(redirect, patches)
    patches.put(torch.jit, "load", _jit_load(redirect, _torch.jit.load))
    if redirect.refuse:
        for name in _BAKING:
            patches.put(torch.jit, name, _unbaked(redirect, name, getattr(torch.jit, name)))


def _patch_storages(redirect: Redirect, patches: Patches) -> None:
    move: Any = torch.UntypedStorage.to

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if not redirect.wants_cuda(device):
            return move(self, device=device, non_blocking=non_blocking)  # type: ignore[no-any-return]
        if marks.is_storage_marked(self):
            return self
        copy: torch.UntypedStorage = _torch.UntypedStorage.clone(self)
        marks.mark_storage(copy, redirect.origin())
        return copy

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        copy: torch.UntypedStorage = clone_(self)
        if marks.is_storage_marked(self):
            marks.mark_storage(copy, marks.origin_of(self))
        return copy

    clone_: Any = torch.UntypedStorage.clone
    patches.put(torch.UntypedStorage, "to", to)
    patches.put(torch.UntypedStorage, "clone", clone)  # of copy.deepcopy()


def _patch_load(redirect: Redirect, patches: Patches) -> None:
    serialization: Any = _torch.serialization
    get_restore_location = serialization._get_restore_location

    def redirected(map_location: Any) -> Callable[[Any, str], Any]:
        restore = get_restore_location(map_location)

        def restore_location(storage: Any, location: str) -> Any:
            if callable(map_location):
                moved = map_location(storage, location)
                if moved is not None:
                    return moved
                target = location
            elif isinstance(map_location, dict):
                target = map_location.get(location, location)
            else:
                target = location if map_location is None else _text(map_location)
            if not (target.split(":")[0] == "cuda" and redirect.wants_cuda(target)):
                return restore(storage, location)
            marks.mark_storage(storage, redirect.origin())
            return storage

        return restore_location

    patches.put(serialization, "_get_restore_location", redirected)


def _text(location: Any) -> str:
    return location.decode() if isinstance(location, bytes) else str(location)


def _jit_load(redirect: Redirect, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            f = io.BytesIO(f.read()) if hasattr(f, "read") else f
            map_location = "cuda" if _was_saved_on_cuda(f) else None
        if not redirect.wants_cuda(map_location):
            return original(f, map_location, *args, **kwargs)
        module = original(f, CPU, *args, **kwargs)
        if redirect.refuse and has_tensor_constants(module):
            raise redirect.refuse(
                "tensors that are written into the code of a TorchScript module cannot move to the GPU"
            )
        redirect.mark(script_tensors(module))
        return module

    return load


def _was_saved_on_cuda(file: Any) -> bool:
    """Whether a TorchScript archive names ``cuda`` as the place of a tensor."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    except (OSError, zipfile.BadZipFile):
        return False
    finally:
        if hasattr(file, "seek"):
            file.seek(0)
    return any(b"cuda:" in data for data in pickles)


def has_tensor_constants(module: torch.jit.ScriptModule) -> bool:
    """Whether tensors that are more than numbers are written into the code of `module`."""
    parts: list[Any] = [part._c for part in module.modules()]
    graphs = [part._get_method(name).graph for part in parts for name in part._method_names()]
    nodes = [node for graph in graphs for node in graph.findAllNodes("prim::Constant")]
    return any(node.hasAttribute("value") and node.kindOf("value") == "t" and node.t("value").dim() for node in nodes)


def _unbaked(redirect: Redirect, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unbaked(*args: Any, **kwargs: Any) -> Any:
        if redirect.refuse and any(map(marks.is_marked, _tensors_in((args, kwargs)))):
            raise redirect.refuse(f"torch.jit.{name} would write into the program that its tensors are on the CPU")
        return original(*args, **kwargs)

    return unbaked


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for leaf in _torch.utils._pytree.tree_leaves(tree):
        if isinstance(leaf, torch.jit.ScriptModule):
            found += script_tensors(leaf)
        elif isinstance(leaf, torch.nn.Module):
            found += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found
