"""Takes an object apart into a pickle and its tensors' bytes, and puts it together over bytes that others have mapped.

`torch.save` would copy every byte for every worker. Here the storages of the tensors stay out of the pickle, as in
torch's own files, so that a worker gets real tensors over memory that all workers share. What pickle cannot carry
(parametrised and TorchScript modules, subclasses of Parameter) is reduced to parts that it can; for the rest there is
an error that says where it sits in the object, before anything is served.
"""

from __future__ import annotations

import gc
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

#: Bytes under which the storage of a buffer is copied by every worker: models write to such buffers (BatchNorm).
SMALL_BUFFER = 1 << 20
#: How many of the names that there are an error lists.
NAMES_LISTED = 10

# For what torch has no annotations of.
_torch: Any = torch

# What the constructor of every module sets; all else in its __dict__ is the app's.
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
# Handles into the context of one process. Some of them pickle, to something useless.
_OF_ONE_PROCESS = (torch.cuda.CUDAGraph, torch.cuda.Stream, torch.cuda.Event)


class PackingError(TypeError):
    """The object cannot be passed to another process, or a name is not in it. The message says where and what to do."""


@dataclass(frozen=True)
class Source:
    """One storage of the loaded object.

    :ivar storage: where the loader put it (CPU or CUDA).
    :ivar private: to be copied by every worker that attaches, since models write to it or the app asked for it.
    :ivar on_cpu: stays on the CPU even when the object lives on a GPU, as it would under ``.to(device)``.
    """

    storage: torch.UntypedStorage
    private: bool
    on_cpu: bool


@dataclass(frozen=True)
class Packed:
    """An object taken apart.

    :ivar pickle: the object without the bytes of its tensors.
    :ivar sources: its storages, each once, in the order in which :func:`unpack` wants their equals.
    :ivar modules: names of the Python modules its classes and functions come from.
    """

    pickle: bytes
    sources: tuple[Source, ...]
    modules: frozenset[str]


def pack(obj: object, *, private: Sequence[str] = ()) -> Packed:
    """Take `obj` apart. Nothing is copied, but the weights of its LSTM, GRU and RNN modules are moved into one storage.

    :param private: shell patterns (as of :func:`fnmatch.fnmatchcase`) of tensors that every worker copies, matched
        against ``blocks.0.weight`` for a module, ``key.blocks.0.weight`` for a module in a dict, ``0.weight`` in a list
        and the empty name for a bare tensor.
    :raises PackingError: if something in `obj` cannot be passed to another process, or a pattern matches nothing.
    """
    survey = _Survey(obj)
    with torch.inference_mode(False):
        for rnn in survey.rnns:
            flatten(rnn)
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(obj)
    except Exception as error:
        path, part = _culprit(obj)
        raise PackingError(_explanation(path, part, error)) from error
    moved = _storages_moved_with(obj)
    copied = _storages_copied(survey, private)
    sources = (
        Source(storage, private=key in copied, on_cpu=storage.device.type == "cpu" and key not in moved)
        for key, storage in pickler.storages.items()
    )
    return Packed(file.getvalue(), tuple(sources), frozenset(pickler.modules))


def unpack(pickle: bytes, storages: Sequence[torch.UntypedStorage]) -> Any:
    """Put an object together over `storages`, without a copy. Nothing in it requires a gradient.

    :param pickle: of :func:`pack`; it is executed, so it must come from there.
    :param storages: equals of the sources, in their order, on whatever device.
    """
    # Under inference_mode() the app would get tensors that it cannot use elsewhere.
    with no_collection(), torch.inference_mode(False):
        return _Unpickler(io.BytesIO(pickle), storages).load()


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing becomes garbage while an object is put together, and to look for it takes longer than all the rest."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # Moves all objects to the oldest generation, where the next small collection does not look at them.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


# What there is in an object: names, buffers, RNNs.


class _Survey:
    """The tensors of an object by name, its buffers, and the modules for cuDNN in it.

    :ivar named: every tensor by every name it has.
    :ivar buffers: the buffers of modules, and whether they are in the module's ``state_dict``.
    """

    def __init__(self, obj: object) -> None:
        self.named: list[tuple[str, torch.Tensor]] = []
        self.buffers: list[tuple[torch.Tensor, bool]] = []
        self.rnns: list[torch.nn.RNNBase] = []
        self._seen: set[int] = set()
        self._visit(obj, "", frozenset(), once=False)

    def _visit(self, obj: object, name: str, above: frozenset[int], once: bool) -> None:
        if id(obj) in above or (once and id(obj) in self._seen):
            return
        self._seen.add(id(obj))
        above |= {id(obj)}
        if isinstance(obj, torch.Tensor):
            self.named.append((name, obj))
        elif isinstance(obj, torch.nn.Module):
            self._visit_module(obj, name, above, once)
        elif _is_program(obj):
            self._visit_program(obj, name, above, once)
        elif isinstance(obj, dict):
            for key, value in obj.items():
                self._visit(value, _joined(name, key), above, once)
        elif isinstance(obj, (list, tuple)):
            for index, value in enumerate(obj):
                self._visit(value, _joined(name, index), above, once)
        elif not isinstance(obj, (type, types.ModuleType, types.FunctionType)):
            # Any graph may hang on an object: each of it once, or the ways through it would be too many.
            for key, value in getattr(obj, "__dict__", {}).items():
                self._visit(value, _joined(name, key), above, once=True)

    def _visit_module(self, module: torch.nn.Module, name: str, above: frozenset[int], once: bool) -> None:
        if isinstance(module, torch.nn.RNNBase) and module not in self.rnns:
            self.rnns.append(module)
        transient = getattr(module, "_non_persistent_buffers_set", ())
        for key, buffer in _buffers(module):
            self.buffers.append((buffer, key not in transient))
        for key, tensor in (*_parameters(module), *_buffers(module)):
            self._visit(tensor, _joined(name, key), above, once)
        for key, child in module._modules.items():
            self._visit(child, _joined(name, key), above, once)
        if not isinstance(module, torch.jit.ScriptModule):
            for key, value in vars(module).items():
                if key not in _MODULE_ATTRIBUTES:
                    self._visit(value, _joined(name, key), above, once=True)

    def _visit_program(self, program: Any, name: str, above: frozenset[int], once: bool) -> None:
        self.buffers += [(buffer, key in program.state_dict) for key, buffer in program.named_buffers()]
        for tensors in (program.state_dict, program.constants):
            self._visit(tensors, name, above, once)


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(recurse=False, remove_duplicate=False)


def _joined(name: str, part: object) -> str:
    return f"{name}.{part}" if name else str(part)


# What is to become of a storage.


def _storages_copied(survey: _Survey, patterns: Sequence[str]) -> set[_Key]:
    """The storages of small and of transient buffers, and of the tensors whose name matches one of `patterns`."""
    copied: set[_Key] = set()
    for buffer, persistent in survey.buffers:
        # By the size of the storage: a small view of a checkpoint must not have every worker copy the checkpoint.
        copied |= {
            key for key, storage in _storages(buffer).items() if not persistent or storage.nbytes() < SMALL_BUFFER
        }
    for pattern in patterns:
        matches = [tensor for name, tensor in survey.named if fnmatchcase(name, pattern)]
        if not matches:
            raise PackingError(_no_match(pattern, [name for name, _ in survey.named]))
        copied.update(*map(_storages, matches))
    return copied


def _no_match(pattern: str, names: list[str]) -> str:
    if not names:
        return f"private={pattern!r} matches nothing: there is no tensor in the object"
    listed = ", ".join(map(repr, names[:NAMES_LISTED]))
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    return f"private={pattern!r} matches no tensor; there are {listed}{more}"


def _storages_moved_with(obj: object) -> set[_Key]:
    """The storages that are reached otherwise than by plain attributes of modules, which ``.to(device)`` passes by."""
    pickler = _MovedPickler()
    pickler.dump(obj)
    for module in pickler.parts:  # grows while it is gone through
        for part in (*_parameters(module), *_buffers(module), *module._modules.items()):
            pickler.dump(part)
    return set(pickler.storages)


def _storages(tensor: torch.Tensor) -> dict[_Key, torch.UntypedStorage]:
    """The storages of a tensor of any kind: two of a sparse one, any number of a subclass."""
    pickler = _Pickler(io.BytesIO())
    pickler.dump(tensor)
    return pickler.storages


# Pickling.

#: What makes two storages the same memory: device and address, or for empty ones the object.
_Key = tuple[torch.device, int]


def _key(storage: torch.UntypedStorage) -> _Key:
    return storage.device, storage.data_ptr() or -storage._cdata


class _Pickler(pickle.Pickler):
    """Leaves storages out and numbers them.

    :ivar storages: the storages met, in the order of their numbers. That they are held keeps their addresses unique.
    :ivar modules: names of the Python modules of the classes and functions met.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: dict[_Key, torch.UntypedStorage] = {}
        self.modules: set[str] = set()
        self._numbers: dict[_Key, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            return self._number(obj)
        if isinstance(obj, torch.TypedStorage):
            return self._number(obj._untyped_storage), obj.dtype
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        key = _key(storage)
        known = self.storages.get(key)
        # Two storages may begin at one address (torch.from_numpy of an array and of its head): the longer holds both.
        if known is None or known.nbytes() < storage.nbytes():
            self.storages[key] = storage
        return self._numbers.setdefault(key, len(self._numbers))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        if isinstance(obj, torch.jit.ScriptModule):
            return _reduce_script(obj)
        if isinstance(obj, torch.nn.Module) and _is_parametrized(obj):
            return _reduce_parametrized(obj)
        if _is_program(obj):
            return _reduce_program(obj)
        if isinstance(obj, types.FunctionType) and obj.__qualname__ == _WEIGHT_NORM_HOOK:
            return _weight_norm_hook, (inspect.getclosurevars(obj).nonlocals["name"],)
        if isinstance(obj, (type, types.FunctionType)):
            if obj.__module__ == "__main__":
                raise pickle.PicklingError("__main__ is another module in a worker")
            self.modules.add(obj.__module__)
        if isinstance(obj, _OF_ONE_PROCESS):
            raise pickle.PicklingError("it belongs to the CUDA context of one process")
        return NotImplemented


class _MovedPickler(_Pickler):
    """Goes around modules and lists them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.parts: list[torch.nn.Module] = []
        self._known: set[int] = set()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module):
            return super().persistent_id(obj)
        if id(obj) not in self._known:
            self._known.add(id(obj))
            self.parts.append(obj)
        return "module"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages
        self._typed: dict[tuple[int, torch.dtype], torch.TypedStorage] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._storages[pid]
        if pid not in self._typed:
            number, dtype = pid
            self._typed[pid] = _torch.TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)
        return self._typed[pid]

    def find_class(self, module: str, name: str) -> Any:
        return _REBUILD.get((module, name)) or super().find_class(module, name)


# Tensors. Those of everyday get a reduction of our own, which is put together in half the time of torch's.


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    kind = type(tensor)
    if isinstance(tensor, _torch.nn.parameter.UninitializedTensorMixin):
        return kind, (False,)
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_plain(tensor):
        rebuild = tensor_over if kind is torch.Tensor else _parameter
        place = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
        metadata = _torch._utils.get_tensor_metadata(tensor)  # conjugate and negative
        return rebuild, (tensor.untyped_storage(), tensor.dtype, *place, *([metadata] if metadata else ()))
    if kind.__reduce_ex__ is torch.nn.Parameter.__reduce_ex__ and kind is not torch.nn.Parameter:
        # torch would make a Parameter of it.
        return _parameter_of, (kind, tensor.data, _torch._utils._get_obj_state(tensor))
    return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether storage, dtype, offset, size and stride are all there is to it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or _torch._utils._get_obj_state(tensor))
    )


#: An empty tensor of each dtype and device: ``.data`` of one is the cheapest new tensor there is.
_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    metadata: dict[str, bool] | None = None,
) -> torch.Tensor:
    """A new tensor over `storage`, which is not copied.

    :param metadata: of ``torch._utils.get_tensor_metadata``: whether it is read conjugated or negated.
    """
    return _placed(_empty(dtype, storage.device).data, storage, offset, size, stride, metadata)


def _parameter(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    parameter = _make_subclass(torch.nn.Parameter, _empty(dtype, storage.device), False)
    return _placed(parameter, storage, *place)


_make_subclass = torch.Tensor._make_subclass


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    kind = dtype, device
    if kind not in _EMPTY:
        _EMPTY[kind] = torch.empty(0, dtype=dtype, device=device)
    return _EMPTY[kind]


def _placed(
    tensor: Any, storage: Any, offset: int, size: Any, stride: Any, metadata: dict[str, bool] | None = None
) -> torch.Tensor:
    """`tensor`, put over `storage`."""
    tensor.set_(storage, offset, size, stride)
    if metadata:
        _torch._utils.set_tensor_metadata(tensor, metadata)
    return tensor  # type: ignore[no-any-return]


def _parameter_of(kind: type[torch.Tensor], data: torch.Tensor, state: Any) -> torch.Tensor:
    parameter: torch.Tensor = _torch._utils._set_obj_state(torch.Tensor._make_subclass(kind, data, False), state)
    return parameter


def _rebuild_tensor_v2(
    storage: torch.TypedStorage, offset: int, size: Any, stride: Any, _grad: bool, _hooks: Any, metadata: Any = None
) -> torch.Tensor:
    return tensor_over(storage._untyped_storage, storage.dtype, offset, size, stride, metadata)


def _rebuild_tensor_v3(
    storage: Any,
    offset: int,
    size: Any,
    stride: Any,
    _grad: bool,
    _hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> torch.Tensor:
    return tensor_over(storage, dtype, offset, size, stride, metadata)


def _rebuild_sparse(layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """As torch's own, which besides holds every tensor in a list until the next `torch.load`."""
    if layout is torch.sparse_coo:
        *parts_, coalesced = parts
        return torch.sparse_coo_tensor(*parts_, check_invariants=False, is_coalesced=coalesced)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _rebuild_wrapper(func: Callable[..., Any], kind: type, args: tuple[Any, ...], state: Any) -> Any:
    """As torch's own, but a subclass without a storage is where its tensors are now, not where they were packed."""
    attributes = state[0] if isinstance(state, tuple) else state
    if func is _REBUILD["torch._utils", "_rebuild_wrapper_subclass"] and isinstance(attributes, dict):
        devices = [value.device for value in attributes.values() if isinstance(value, torch.Tensor)]
        args = (*args[:6], devices[0] if devices else args[6], *args[7:])
    return _torch._tensor._rebuild_from_type_v2(func, kind, args, state)


def _without_grad(name: str, position: int) -> Callable[..., Any]:
    """torch's own function `name` with False for its argument `requires_grad`."""
    rebuild = getattr(torch._utils, name)

    def rebuild_without_grad(*args: Any) -> Any:
        return rebuild(*args[:position], False, *args[position + 1 :])

    return rebuild_without_grad


_REBUILD: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_sparse_tensor"): _rebuild_sparse,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_wrapper,
}
for _name, _position in (
    ("_rebuild_parameter", 1),
    ("_rebuild_parameter_with_state", 1),
    ("_rebuild_meta_tensor_no_storage", 3),
    ("_rebuild_qtensor", 5),
    ("_rebuild_wrapper_subclass", 7),
):
    _REBUILD["torch._utils", _name] = _without_grad(_name, _position)


# Modules.


def flatten(rnn: torch.nn.RNNBase) -> None:
    """Lay the weights out in one storage as cuDNN wants them, or every call on a GPU compacts them, with a warning.

    The layout is that of ``_cudnn_rnn_flatten_weight``: `get_parameters` and `try_get_weight_buf` in torch's
    aten/src/ATen/native/cudnn/RNN.cpp check it against cuDNN's own, and an H200 (cuDNN 9, float16 to float64, one to
    three layers, both directions, projections) gave it too: the matrices of every layer and direction, then the biases,
    each without a gap in the order of ``_flat_weights``. cuDNN wants room for biases, zeros, where there are none.
    """
    named: list[tuple[str, Any]] = list(zip(rnn._flat_weights_names, rnn._flat_weights, strict=False))
    matrices = [weight for name, weight in named if name.startswith("weight")]
    ordered = matrices + [weight for name, weight in named if name.startswith("bias")]
    if not _can_be_flattened(ordered):
        return
    room = 0 if rnn.bias else 2 * sum(weight.size(0) for name, weight in named if name.startswith("weight_ih"))
    ends = list(accumulate((weight.numel() for weight in ordered), initial=0))
    if _is_flat(ordered, ends, room):
        return
    flat = torch.zeros(ends[-1] + room, dtype=ordered[0].dtype, device=ordered[0].device)
    for weight, start, end in zip(ordered, ends, ends[1:], strict=False):
        weight.data = flat[start:end].view(weight.size()).copy_(weight.detach())


def _can_be_flattened(weights: list[Any]) -> bool:
    """As in ``RNNBase.flatten_parameters``: tensors of one kind, none tied to another."""
    if not all(type(weight) is torch.nn.Parameter and weight.layout is torch.strided for weight in weights):
        return False  # parametrised, say
    kinds = {(weight.dtype, weight.device) for weight in weights}
    return len(kinds) == 1 and len({weight.data_ptr() for weight in weights}) == len(weights)


def _is_flat(weights: list[Any], ends: list[int], room: int) -> bool:
    storages = [weight.untyped_storage() for weight in weights]
    return (
        len(set(map(_key, storages))) == 1
        and storages[0].nbytes() >= (ends[-1] + room) * weights[0].element_size()
        and all(weight.is_contiguous() for weight in weights)
        and [weight.storage_offset() for weight in weights] == ends[:-1]
    )


def _is_parametrized(module: torch.nn.Module) -> bool:
    """Whether its class was made by `torch.nn.utils.parametrize`, which refuses to be pickled."""
    return type(module).__module__ == parametrize.__name__ and type(module).__name__.startswith("Parametrized")


def _reduce_parametrized(module: torch.nn.Module) -> Any:
    base = type(module).__bases__[0]
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    getstate = getattr(base, "__getstate__", None)  # of every object since Python 3.11
    return _parametrized, (base, names), getstate(module) if getstate else vars(module)


def _parametrized(base: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    """A module of `base` without attributes, in which `names` are computed."""
    module: torch.nn.Module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


# `torch.nn.utils.parametrizations.weight_norm` leaves a function of its own in the module, which pickle cannot name.
_WEIGHT_NORM_HOOK = "weight_norm.<locals>._weight_norm_compat_hook"


def _weight_norm_hook(name: str) -> Any:
    """The function that reads the old names of tensor `name` from a ``state_dict``."""
    module: Any = torch.nn.Module()
    module.register_parameter(name, torch.nn.Parameter(torch.ones(1, 1, device="cpu")))
    parametrizations.weight_norm(module, name)
    return next(iter(module._load_state_dict_pre_hooks.values())).hook


# What only torch's own archives can carry: TorchScript and exported programs. Their tensors are taken out meanwhile.


def _reduce_script(module: torch.jit.ScriptModule) -> Any:
    return _script, _archived(torch.jit.save, module, script_tensors(module))


def _script(archive: bytes, weights: list[torch.Tensor]) -> torch.jit.ScriptModule:
    with _no_warnings():
        module: torch.jit.ScriptModule = _torch.jit.load(io.BytesIO(archive))
    _put_in(script_tensors(module), weights)
    return module


def _is_program(obj: object) -> bool:
    # By name: torch.export takes a while to import, and where it was not there is no program.
    return type(obj).__name__ == "ExportedProgram" and type(obj).__module__ == "torch.export.exported_program"


def _reduce_program(program: Any) -> Any:
    return _program, _archived(torch.export.save, program, _program_tensors(program))


def _program(archive: bytes, weights: list[torch.Tensor]) -> Any:
    with _no_warnings():
        program = torch.export.load(io.BytesIO(archive))
    _put_in(_program_tensors(program), weights)
    return program


def _program_tensors(program: Any) -> list[torch.Tensor]:
    tables: tuple[dict[str, Any], ...] = program.state_dict, program.constants
    return [tensor for table in tables for _, value in sorted(table.items()) for tensor in _plain_tensors(value)]


def _archived(
    save: Callable[[Any, io.BytesIO], None], obj: Any, tensors: list[torch.Tensor]
) -> tuple[bytes, list[torch.Tensor]]:
    """What `save` writes of `obj` without the bytes of its `tensors`, and plain tensors over the same storages."""
    weights = [tensor.detach() for tensor in tensors]
    archive = io.BytesIO()
    try:
        for tensor in tensors:
            tensor.data = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.size())
        with _no_warnings():
            save(obj, archive)
    finally:
        for tensor, weight in zip(tensors, weights, strict=True):
            tensor.data = weight
    return archive.getvalue(), weights


def _put_in(tensors: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for tensor, weight in zip(tensors, weights, strict=True):
        tensor.data = weight
        tensor.requires_grad_(False)


def script_tensors(module: torch.jit.ScriptModule) -> list[torch.Tensor]:
    """The tensors in the attributes of a TorchScript module, in an order that saving and loading keeps.

    Not the parameters and buffers alone: the forward of an LSTM reads the list ``_flat_weights``, whose tensors need
    not be the same objects as the parameters once the module was loaded.
    """
    tensors: list[torch.Tensor] = []
    for _, part in sorted(module.named_modules(remove_duplicate=False), key=lambda named: named[0]):
        kind = _torch._C.ConcreteModuleType.from_jit_type(part._c._type())
        for name in sorted(kind.get_attributes()):
            tensors.extend(_plain_tensors(part._c.getattr(name)))
    return tensors


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _plain_tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _plain_tensors(part)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """That TorchScript is deprecated, say: the app has heard of it when it made or loaded its module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Errors.


def _culprit(obj: object) -> tuple[str, object]:
    """The innermost part of `obj` that cannot be pickled, and the way to it."""
    path, way = "", [obj]
    while True:
        broken = ((name, part) for name, part in _parts(way[-1]) if not _is_in(way, part) and not _can_be_packed(part))
        name, part = next(broken, ("", None))
        if part is None:
            return path, way[-1]
        path = _joined(path, name) if name else path
        way.append(part)


def _is_in(way: list[object], part: object) -> bool:
    return any(part is step for step in way)


def _can_be_packed(obj: object) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(obj)
    except Exception:
        return False
    return True


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    """What is pickled of `obj`, each by its name; without one what has none, such as its class."""
    if isinstance(obj, (type, types.FunctionType)):
        return  # pickled by name
    if isinstance(obj, dict):
        yield from ((str(key), value) for key, value in obj.items())
        yield from (("", key) for key in obj)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((str(index), value) for index, value in enumerate(obj))
    else:
        function, args, state, items, pairs = _reduced(obj)
        yield from (("", part) for part in (function, *args))
        for attributes in state if isinstance(state, tuple) else (state,):
            yield from _attributes(attributes)
        yield from ((str(index), value) for index, value in enumerate(items or ()))
        yield from ((str(key), value) for key, value in pairs or ())


def _attributes(state: object) -> Iterator[tuple[str, object]]:
    if not isinstance(state, dict):
        yield "", state
        return
    for name, value in state.items():
        if name in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _reduced(obj: Any) -> tuple[Any, ...]:
    """The five parts of what `obj` is reduced to, if it can be."""
    try:
        reduced = _Pickler(io.BytesIO()).reducer_override(obj)
        if reduced is NotImplemented:
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        reduced = None
    parts = reduced[:5] if isinstance(reduced, tuple) else (None, ())
    return (*parts, *(None,) * (5 - len(parts)))


def _explanation(path: str, part: object, error: Exception) -> str:
    what, remedy = _diagnosis(part)
    return f"{path or 'the object itself'} is {what}, which cannot be passed to another process ({error}): {remedy}"


def _diagnosis(part: object) -> tuple[str, str]:
    if isinstance(part, types.FunctionType):
        kind = "a lambda" if part.__name__ == "<lambda>" else f"the function {_full_name(part)}"
        return kind, "make it a module-level function, in a module that the app imports, or build it after share()"
    if isinstance(part, type):
        return f"of the class {_full_name(part)}", "define the class at the level of a module that the app imports"
    return f"an object of type {_full_name(type(part))}", "build it after share(), or leave it out of the object"


def _full_name(part: type | types.FunctionType) -> str:
    return f"{part.__module__}.{part.__qualname__}"
