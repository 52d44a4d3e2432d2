"""Objects taken apart and put together over other memory, compared bit for bit with what they were."""

import collections
import copy
import functools
import gc
import io
import threading
import warnings
import weakref

import pytest
import torch
from torch.nn.utils import parametrize

from gpuworker.weights.packing import Packed, PackingError, pack, unpack

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),
    *(
        pytest.mark.filterwarnings(f"ignore:{warning}")
        for warning in (".*support is experimental", ".*quantize", "Sparse", "TypedStorage", "LSTM with projections")
    ),
]

DTYPES = sorted({str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})
QUANTISED = [name for name in DTYPES if name.startswith(("q", "quint"))]
DENSE = [name for name in DTYPES if name not in QUANTISED]


# Things to pack. Pickle wants them at the level of a module.


class Labelled(torch.Tensor):
    pass


class Scale(torch.nn.Parameter):
    pass


class Pair(torch.Tensor):
    """Has no storage, but two tensors that have."""

    @staticmethod
    def __new__(cls, high, low):
        return torch.Tensor._make_wrapper_subclass(cls, high.size(), dtype=high.dtype, device=high.device)

    def __init__(self, high, low):
        self.high, self.low = high, low

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].high, args[0].low)
        raise NotImplementedError(func)


class Symmetric(torch.nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class Keeper(torch.nn.Module):
    """Tensors wherever a module may have them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("large", torch.zeros(1 << 18))
        self.plain = torch.randn(3)
        self.view = self.weight.detach()[1:]
        self.many = {"caches": [torch.randn(2), (torch.randn(2),)]}
        self.hidden = [torch.nn.Linear(2, 2)]


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.LSTM(3, 4, 2)
        self.again = self.rnn.weight_ih_l0
        self.register_buffer("shift", torch.randn(4))
        self.plain = torch.randn(4)
        self.table = {"a": torch.randn(4)}

    def forward(self, x):
        return self.rnn(x)[0] + self.shift + self.plain + self.table["a"] + self.again.sum()


class Act(torch.nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act


class Holder:
    def __init__(self, value):
        self.value = value


class Reticent:
    def __init__(self):
        self.lock = threading.Lock()
        self.open = lambda: None

    def __getstate__(self):
        return {"open": self.open}


def module_level(x):
    return x


# Putting together, and comparing.


def copies(packed: Packed) -> list[torch.UntypedStorage]:
    return [copy.deepcopy(source.storage) for source in packed.sources]


def through(obj, **options):
    packed = pack(obj, **options)
    return unpack(packed.pickle, copies(packed))


def raw(tensor):
    """The bytes of all of the storage under a dense tensor."""
    return bytes(tensor.untyped_storage())


def assert_same(result, tensor):
    assert type(result) is type(tensor)
    assert (result.dtype, result.size(), result.stride()) == (tensor.dtype, tensor.size(), tensor.stride())
    assert result.storage_offset() == tensor.storage_offset()
    assert raw(result) == raw(tensor)
    assert not result.requires_grad
    assert result.is_leaf


def assert_same_state(result, module):
    assert type(result) is type(module)
    before, after = module.state_dict(), result.state_dict()
    assert list(after) == list(before)
    for name in before:
        assert_same(after[name], before[name].detach())


def assert_equal_state(result, module):
    assert all(torch.equal(result.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def address(tensor):
    return tensor.untyped_storage().data_ptr()


# Tensors.


@pytest.mark.parametrize("name", DENSE)
def test_every_dtype(name):
    dtype = getattr(torch, name)
    tensor = torch.empty(0, dtype=dtype).set_(torch.arange(64, dtype=torch.uint8).untyped_storage(), 1, (2,), (1,))
    assert_same(through(tensor), tensor)


@pytest.mark.parametrize("name", DENSE)
def test_every_dtype_with_an_attribute(name):
    tensor = torch.empty(0, dtype=getattr(torch, name)).set_(torch.arange(64, dtype=torch.uint8).untyped_storage())
    tensor.label = "labelled"
    result = through(tensor)
    assert_same(result, tensor)
    assert result.label == "labelled"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0).view(4, 6)[1:, ::2],
        torch.arange(3.0).expand(5, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["scalar", "empty", "no elements", "transposed", "strided", "expanded", "channels last"],
)
def test_shapes(tensor):
    assert_same(through(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantised_by_tensor(dtype):
    tensor = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 2, dtype)
    result = through(tensor)
    assert_same(result, tensor)
    assert (result.q_scale(), result.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2])
def test_quantised_by_channel(dtype):
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3)
    tensor = torch.quantize_per_channel(torch.randn(3, 4), scales, zeros, 0, dtype)
    result = through(tensor)
    assert_same(result, tensor)
    assert torch.equal(result.q_per_channel_scales(), tensor.q_per_channel_scales())
    assert result.q_per_channel_axis() == 0


def test_conjugate_and_negative():
    tensor = torch.randn(3, dtype=torch.complex64)
    conjugate, negative = through((tensor.conj(), tensor.conj().imag))
    assert conjugate.is_conj()
    assert negative.is_neg()
    assert torch.equal(conjugate, tensor.conj())
    assert torch.equal(negative, tensor.conj().imag)
    assert address(conjugate) == address(negative)


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced):
    tensor = torch.sparse_coo_tensor([[0, 0, 1], [2, 2, 0]], [1.0, 2.0, 3.0], (2, 3))
    tensor = tensor.coalesce() if coalesced else tensor
    packed = pack(tensor)
    storages = copies(packed)
    result = unpack(packed.pickle, storages)
    assert result.is_coalesced() is coalesced
    assert_same(result._indices(), tensor._indices())
    assert_same(result._values(), tensor._values())
    assert {address(result._indices()), address(result._values())} == {storage.data_ptr() for storage in storages}


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_sparse_compressed(layout):
    block = {"blocksize": (1, 1)} if layout.startswith("b") else {}
    tensor = getattr(torch.eye(4), f"to_sparse_{layout}")(**block)
    packed = pack(tensor)
    storages = copies(packed)
    result = unpack(packed.pickle, storages)
    assert result.layout is tensor.layout
    assert torch.equal(result.to_dense(), tensor.to_dense())
    assert address(result.values()) in {storage.data_ptr() for storage in storages}


def test_sparse_tensors_do_not_stay_in_torchs_list():
    through(torch.eye(3).to_sparse())
    assert torch._utils._sparse_tensors_to_validate == []


def test_subclass_with_attribute():
    tensor = torch.randn(4).as_subclass(Labelled)
    tensor.label = {"scale": torch.ones(2)}
    result = through(tensor)
    assert_same(result.as_subclass(torch.Tensor), tensor.as_subclass(torch.Tensor))
    assert type(result) is Labelled
    assert torch.equal(result.label["scale"], torch.ones(2))


def test_subclass_without_storage():
    result = through(torch.nn.ParameterList([Pair(torch.randn(3), torch.randn(3))]))[0]
    assert type(result) is Pair
    assert isinstance(result, torch.nn.Parameter)
    assert not result.requires_grad
    assert result.low.size() == (3,)


def test_subclass_of_parameter():
    scale = Scale(torch.randn(2))
    scale.unit = "dB"
    result = through(scale)
    assert_same(result, scale.detach().as_subclass(Scale))
    assert result.unit == "dB"


def test_parameter_with_attribute():
    parameter = torch.nn.Parameter(torch.randn(2))
    parameter.sharded = True
    result = through(parameter)
    assert type(result) is torch.nn.Parameter
    assert result.sharded
    assert not result.requires_grad


def test_result_of_a_graph_is_a_value():
    weight = torch.randn(3, requires_grad=True)
    assert_same(through(weight * 2), (weight * 2).detach())


def test_meta_tensor():
    result = through(torch.empty(3, device="meta", requires_grad=True))
    assert result.device.type == "meta"
    assert not result.requires_grad


def test_uninitialized_parameter():
    result = through(torch.nn.LazyLinear(3))
    assert isinstance(result.weight, torch.nn.UninitializedParameter)
    assert not result.weight.requires_grad


def test_bare_storages():
    storage = torch.arange(4.0).untyped_storage()
    untyped, typed, again = through([storage, *[torch.TypedStorage(wrap_storage=storage, dtype=torch.float)] * 2])
    assert bytes(untyped) == bytes(storage)
    assert typed.dtype is torch.float
    assert typed is again
    assert typed._data_ptr() == untyped.data_ptr()


# Ties.


def test_a_storage_is_carried_once_and_not_copied():
    base = torch.arange(12.0)
    packed = pack({"base": base, "view": base[3:7], "bytes": base.view(torch.uint8), "same": base})
    (storage,) = copies(packed)
    result = unpack(packed.pickle, [storage])
    assert {address(tensor) for tensor in result.values()} == {storage.data_ptr()}
    assert result["same"] is result["base"]
    result["view"][0] = -1
    assert result["base"][3] == -1


def test_storages_of_one_address_are_one():
    array = torch.arange(6.0).numpy()
    head, whole = torch.from_numpy(array[:2]), torch.from_numpy(array)
    packed = pack([head, whole])
    assert [source.storage.nbytes() for source in packed.sources] == [24]
    head, whole = unpack(packed.pickle, copies(packed))
    assert head.data_ptr() == whole.data_ptr()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_pickle_has_no_bytes_of_tensors():
    packed = pack(torch.nn.Linear(1000, 1000))
    assert len(packed.pickle) < 2000
    assert [source.storage.nbytes() for source in packed.sources] == [4_000_000, 4000]


def test_containers_and_shared_references():
    shared = [torch.randn(2)]
    value = collections.OrderedDict(a=shared, b=(shared, {"c": shared}), d=functools.partial(module_level, shared))
    value["self"] = value
    result = through(value)
    assert type(result) is collections.OrderedDict
    assert result["a"] is result["b"][0] is result["b"][1]["c"] is result["d"].args[0]
    assert result["self"] is result


# Modules.


def test_tied_weights():
    model = Tied()
    result = through(model)
    assert result.head.weight is result.embedding.weight
    assert_same_state(result, model)
    assert torch.equal(result(torch.arange(5)), model(torch.arange(5)))


def test_everything_a_module_holds():
    model = Keeper()
    result = through(model)
    assert_same_state(result, model)
    assert_same(result.mask, model.mask)
    assert_same(result.plain, model.plain)
    assert_same(result.many["caches"][1][0], model.many["caches"][1][0])
    assert_same(result.hidden[0].weight.data, model.hidden[0].weight.data)
    assert address(result.view) == address(result.weight)
    assert "mask" not in result.state_dict()


def test_the_packed_module_is_left_as_it_was():
    model = Keeper()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    pack(model)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert model.weight.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_kept_and_gradients_are_off(training):
    result = through(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).train(training))
    assert [module.training for module in result.modules()] == [training] * 3
    assert not any(parameter.requires_grad for parameter in result.parameters())


def test_parametrize():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    torch.nn.utils.parametrizations.weight_norm(model[1])
    model.eval()
    result = through(model)
    assert list(result.state_dict()) == list(model.state_dict())
    assert parametrize.is_parametrized(result[0], "weight")
    assert type(result[0]).__name__ == "ParametrizedLinear"
    x = torch.randn(2, 3)
    assert torch.equal(result(x), model(x))
    assert torch.equal(copy.deepcopy(result)(x), model(x))
    # As checkpoints of the old weight_norm name them.
    state = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): value
        for name, value in model[1].state_dict().items()
    }
    assert "weight_g" in state
    result[1].load_state_dict(state)
    parametrize.remove_parametrizations(result[0], "weight")
    assert type(result[0]) is torch.nn.Linear
    assert type(model[0]) is not torch.nn.Linear


def test_graph_module():
    model = torch.fx.symbolic_trace(Tied())
    assert torch.equal(through(model)(torch.arange(3)), model(torch.arange(3)))


RNNS = [
    (torch.nn.LSTM, {}),
    (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (torch.nn.LSTM, {"proj_size": 2}),
    (torch.nn.LSTM, {"proj_size": 2, "bias": False, "num_layers": 2}),
    (torch.nn.GRU, {"num_layers": 2, "batch_first": True}),
    (torch.nn.RNN, {"bias": False}),
]


@pytest.mark.parametrize(("kind", "options"), RNNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rnn_is_laid_out_for_cudnn(kind, options, dtype):
    # Without gradients, which alone change the last bit of a GRU with batch_first.
    rnn = kind(3, 4, dtype=dtype, **options).requires_grad_(False)
    state = copy.deepcopy(rnn.state_dict())
    x = torch.randn(5, 2, 3, dtype=dtype)
    before = rnn(x)[0]
    packed = pack(rnn)
    assert len(packed.sources) == 1
    result = unpack(packed.pickle, copies(packed))
    for name, weight in state.items():
        assert torch.equal(result.state_dict()[name], weight)
    assert torch.equal(result(x)[0], before)
    assert torch.equal(rnn(x)[0], before)

    named = dict(result.named_parameters())
    assert all(w is named[name] for w, name in zip(result._flat_weights, result._flat_weights_names, strict=True))
    weights = [getattr(result, name) for name in result._flat_weights_names if name.startswith("weight")]
    biases = [getattr(result, name) for name in result._flat_weights_names if name.startswith("bias")]
    end = 0
    for weight in weights + biases:
        assert weight.storage_offset() == end
        assert weight.is_contiguous()
        end += weight.numel()
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind.__name__]
    directions = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    room = 0 if rnn.bias else 2 * gates * 4 * directions
    assert packed.sources[0].storage.nbytes() == (end + room) * dtype.itemsize
    assert not any(raw(weights[0])[end * dtype.itemsize :])


def test_rnn_that_is_laid_out_is_left_alone():
    rnn = torch.nn.GRU(3, 4)
    (first,) = pack(rnn).sources
    (second,) = pack({"nested": [Holder(rnn)]}).sources
    assert first.storage.data_ptr() == second.storage.data_ptr()


def test_rnn_with_weights_in_one_storage_of_another_order_is_laid_out():
    rnn = torch.nn.GRU(3, 4)
    flat = torch.nn.utils.parameters_to_vector(reversed(list(rnn.parameters()))).detach()
    end = 0
    for parameter in reversed(list(rnn.parameters())):
        parameter.data = flat[end : (end := end + parameter.numel())].view_as(parameter)
    assert through(rnn).weight_ih_l0.storage_offset() == 0


def test_rnn_with_tied_weights_keeps_them():
    rnn = torch.nn.LSTM(4, 4, 2)
    rnn.weight_hh_l1 = rnn.weight_hh_l0
    result = through(rnn)
    assert result.weight_hh_l1 is result.weight_hh_l0


# What apps do with the result.


def test_result_can_be_copied_saved_and_loaded():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 3))
    result = through({"model": model})["model"]
    assert_equal_state(copy.deepcopy(result), model)
    result.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    assert_equal_state(torch.load(file, weights_only=False), model)


def test_save_writes_the_tensors_own_bytes():
    first, _ = through([torch.randn(100), torch.randn(1_000_000)])
    file = io.BytesIO()
    torch.save(first, file)
    assert file.tell() < 3000


def test_result_can_be_trained_again():
    result = through(torch.nn.Linear(2, 1)).requires_grad_()
    result(torch.ones(1, 2)).sum().backward()
    assert result.weight.grad.tolist() == [[1.0, 1.0]]


def test_result_of_inference_mode_is_of_use_without():
    with torch.inference_mode():
        result = through(torch.nn.LSTM(2, 1))
    assert not any(parameter.is_inference() for parameter in result.parameters())
    through(torch.ones(1)).add_(1)


def test_default_device_changes_nothing():
    value = {"script": scripted(), "ones": torch.ones(2)}
    with torch.device("meta"):
        result = through(value)
    assert {tensor.device.type for tensor in (*result["script"].parameters(), result["ones"])} == {"cpu"}


def test_garbage_collection_is_as_before():
    through(torch.ones(1))
    assert gc.isenabled()
    gc.disable()
    try:
        through(torch.ones(1))
        assert not gc.isenabled()
    finally:
        gc.enable()


# TorchScript.


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Scripted().eval())


@pytest.mark.parametrize("load_first", [False, True])
def test_scripted_module(load_first):
    model = scripted()
    if load_first:
        model = torch.jit.load(io.BytesIO(model.save_to_buffer()))
    x = torch.randn(5, 3)
    before = model(x)
    packed = pack({"model": model})
    storages = copies(packed)
    result = unpack(packed.pickle, storages)["model"]
    assert torch.equal(result(x), before)
    assert torch.equal(model(x), before)
    assert isinstance(result, torch.jit.ScriptModule)
    assert not result.training
    assert address(result.again) == address(result.rnn.weight_ih_l0)
    assert list(result.state_dict()) == list(model.state_dict())
    for name, tensor in result.state_dict().items():
        assert_same(tensor, model.state_dict()[name].detach())
        assert address(tensor) in {storage.data_ptr() for storage in storages}
    assert not any(parameter.requires_grad for parameter in result.parameters())


def test_traced_module():
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)).eval()
    x = torch.randn(2, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, x)
    packed = pack(traced)
    assert len(packed.pickle) < 50_000
    result = unpack(packed.pickle, copies(packed))
    assert torch.equal(result(x), model(x))
    assert sorted(source.private for source in packed.sources) == [False, False, False, False, True, True, True]


def test_frozen_module_has_its_weights_in_the_archive():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.freeze(torch.jit.script(torch.nn.Linear(3, 3).eval()))
    packed = pack(frozen)
    assert packed.sources == ()
    assert torch.equal(unpack(packed.pickle, [])(torch.ones(3)), frozen(torch.ones(3)))


def test_script_module_is_whole_after_a_failed_save(monkeypatch):
    model = scripted()
    x = torch.randn(5, 3)
    before = model(x)

    def fail(*args):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(torch.jit, "save", fail)
    with pytest.raises(PackingError, match=r"^model is an object of type .*ScriptModule.*disk on fire"):
        pack({"model": model})
    assert torch.equal(model(x), before)


# Exported programs.


class Exported(Tied):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.randn(10))
        self.register_buffer("scale", torch.randn(10), persistent=False)
        self.constant = torch.randn(10)

    def forward(self, ids):
        return super().forward(ids) * self.scale + self.shift + self.constant


@pytest.mark.filterwarnings("ignore")
def test_exported_program():
    ids = torch.arange(5)
    program = torch.export.export(Exported().eval(), (ids,))
    before = program.module()(ids)
    packed = pack({"program": program}, private=["program.constant"])
    assert {source.storage.nbytes(): source.private for source in packed.sources} == {160: False, 40: True}
    storages = copies(packed)
    result = unpack(packed.pickle, storages)["program"]
    assert torch.equal(result.module()(ids), before)
    assert torch.equal(program.module()(ids), before)
    assert list(result.state_dict) == list(program.state_dict)
    assert address(result.state_dict["head.weight"]) == address(result.state_dict["embedding.weight"])
    assert {address(tensor) for tensor in (*result.state_dict.values(), *result.constants.values())} == {
        storage.data_ptr() for storage in storages
    }
    assert not any(tensor.requires_grad for tensor in result.state_dict.values())


@pytest.mark.filterwarnings("ignore")
def test_exported_program_does_not_hold_its_weights():
    program = torch.export.export(torch.nn.Linear(1000, 1000), (torch.ones(1, 1000),))
    assert len(pack(program).pickle) < 100_000


# What is to become of the storages.


def fate(packed: Packed, tensor: torch.Tensor) -> tuple[bool, bool]:
    (source,) = [source for source in packed.sources if source.storage.data_ptr() == address(tensor)]
    return source.private, source.on_cpu


def test_buffers_are_private_if_small_or_transient():
    model = Keeper()
    model.register_buffer("cache", torch.zeros(1 << 18), persistent=False)
    packed = pack({"model": [model]})
    private = {name: fate(packed, tensor)[0] for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert private == {"weight": False, "count": True, "mask": True, "large": False, "cache": True}


def test_parameter_that_shares_with_a_private_buffer():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("alias", model.weight.data[0])
    assert fate(pack(model), model.weight) == (True, False)


def test_small_view_of_a_large_storage_is_not_private():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("head", torch.zeros(1 << 20)[:2])
    assert fate(pack(model), model.head) == (False, False)


def test_buffers_of_any_kind_are_private():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    packed = pack(model)
    assert fate(packed, model.graph._values()) == (True, False)
    assert fate(packed, model.graph._indices()) == (True, False)


@pytest.mark.parametrize(
    ("wrap", "pattern"),
    [
        (lambda model: model, "0.weight"),
        (lambda model: {"net": model}, "net.0.weight"),
        (lambda model: [None, {"net": (model,)}], "1.net.0.0.weight"),
        (lambda model: Holder({"net": model}), "value.net.0.weight"),
        (lambda model: {"a": model, "b": model}, "b.0.weight"),
        (lambda model: Act([model]), "act.0.0.weight"),
        (lambda model: model[0].weight, ""),
    ],
    ids=["module", "dict", "nested", "object", "twice", "attribute", "tensor"],
)
def test_private_by_name(wrap, pattern):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    packed = pack(wrap(model), private=[pattern])
    assert fate(packed, model[0].weight)[0]
    assert sum(source.private for source in packed.sources) == 1


def test_private_names_are_those_of_named_parameters():
    model = torch.nn.Sequential(Tied(), Keeper())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in (*names, *(name for name, _ in model.named_buffers(remove_duplicate=False))):
        pack(model, private=[name])


def test_private_pattern_matches_with_case_and_several():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    packed = pack(model, private=["*.bias", "1.*"])
    assert sum(source.private for source in packed.sources) == 3
    with pytest.raises(PackingError):
        pack(model, private=["*.BIAS"])


def test_private_pattern_that_matches_nothing():
    with pytest.raises(PackingError, match=r"^private='weigth' matches no tensor; there are 'weight', 'bias'$"):
        pack(torch.nn.Linear(1, 1), private=["weigth"])
    with pytest.raises(PackingError, match=r"'9' and 5 more$"):
        pack([torch.ones(1) for _ in range(15)], private=["x"])
    with pytest.raises(PackingError, match="there is no tensor in the object"):
        pack({"a": 1}, private=["a"])


def test_on_cpu_is_what_dot_to_does_not_move():
    model = Keeper()
    packed = pack(model)
    stays = [model.plain, model.many["caches"][0], model.many["caches"][1][0], model.hidden[0].weight]
    assert [fate(packed, tensor)[1] for tensor in stays] == [True] * 4
    moves = [model.weight, model.view, model.count, model.mask, model.large]
    assert [fate(packed, tensor)[1] for tensor in moves] == [False] * 5


def test_containers_and_objects_move():
    tensors = [torch.randn(2) for _ in range(4)]
    packed = pack({"a": tensors[0], "b": [tensors[1], Holder(tensors[2])], "c": collections.deque([tensors[3]])})
    assert [source.on_cpu for source in packed.sources] == [False] * 4


def test_attribute_that_is_reached_otherwise_too_moves():
    model = Keeper()
    assert fate(pack([model, model.plain]), model.plain) == (False, False)
    assert fate(pack([model, Holder(model.plain)]), model.plain) == (False, False)


# What cannot be packed.


def local_class():
    class Local(torch.nn.Module):
        pass

    return Local


def blocks(culprit):
    return {"model": torch.nn.ModuleDict({"blocks": torch.nn.Sequential(torch.nn.Linear(1, 1), Act(culprit))})}


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (lambda: lambda x: x, "a lambda", "make it a module-level function"),
        (lambda: local_class.__code__, "an object of type builtins.code", "build it after share()"),
        (lambda: threading.Lock(), "an object of type _thread.lock", "build it after share()"),
        (lambda: (x for x in ()), "an object of type builtins.generator", "build it after share()"),
        (lambda: io.TextIOWrapper(io.BytesIO()), "an object of type _io.TextIOWrapper", "build it after share()"),
        (lambda: torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph), "torch.cuda.graphs.CUDAGraph", "after share()"),
        (local_class, r"of the class .*local_class.<locals>.Local", "at the level of a module"),
        (lambda: local_class()(), r"of the class .*local_class.<locals>.Local", "at the level of a module"),
        (lambda: functools.partial(lambda x: x), "a lambda", "make it a module-level function"),
    ],
    ids=["lambda", "code", "lock", "generator", "file", "graph", "class", "instance", "partial"],
)
def test_error_names_path_type_and_remedy(make, what, remedy):
    with pytest.raises(PackingError, match=rf"^model\.blocks\.1\.act is .*{what}.*cannot be.*{remedy}") as caught:
        pack(blocks(make()))
    assert caught.value.__cause__ is not None


def test_error_goes_on_into_the_culprit():
    with pytest.raises(PackingError, match=r"^0\.value\.lock\.1 is an object of type _thread.lock"):
        pack([Holder({"lock": [1, threading.Lock()]})])


def test_error_about_local_function():
    def local(x):
        return x

    with pytest.raises(PackingError, match=r"^hook is the function .*<locals>.local, which"):
        pack({"hook": local})


def test_error_about_the_object_itself():
    with pytest.raises(PackingError, match=r"^the object itself is a lambda"):
        pack(lambda: None)


def test_error_in_a_circle():
    first, second = Holder(None), Holder(threading.Lock())
    first.back, second.back = second, first
    with pytest.raises(PackingError, match=r"^back\.value is an object of type _thread.lock"):
        pack(first)


@pytest.mark.parametrize("make", [lambda: Holder, lambda: Holder(1)])
def test_error_about_main(make, monkeypatch):
    monkeypatch.setattr(Holder, "__module__", "__main__")
    with pytest.raises(PackingError, match=r"^a is of the class __main__.Holder.*another module in a worker"):
        pack({"a": make()})


def test_error_is_not_about_an_attribute_that_is_left_out_of_the_pickle():
    with pytest.raises(PackingError, match=r"^open is a lambda"):
        pack(Reticent())


def test_names_the_modules_of_what_is_inside():
    mixed = {"a": [Holder(torch.nn.Linear(1, 1))], "b": (torch.nn.functional.relu,)}
    assert pack(mixed).modules >= {__name__, "torch.nn.modules.linear", "torch.nn.functional"}


def test_leaves_the_garbage_collector_as_it_was():
    class Loop:
        def __init__(self):
            self.itself = self

    packed = pack(torch.nn.Linear(1, 1))
    loop = weakref.ref(Loop())
    unpack(packed.pickle, [source.storage for source in packed.sources])
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert loop() is None
