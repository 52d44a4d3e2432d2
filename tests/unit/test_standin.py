"""What an app puts on cuda stays on the CPU, and answers as if it were there."""

from __future__ import annotations

import copy
import functools
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch

from gpuworker.standin import marks, redirect
from tests.live.server import REPOSITORY
from tests.unit.children import run_child

#: Of torch, about its own old names, and TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore")


class Refused(RuntimeError):
    pass


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` in a process of its own: torch tells only once that it is about to start CUDA."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_child(lambda: (torch.set_num_threads(1), test(**fixtures)))  # more of them the fork has lost

    return run


@pytest.fixture(params=["before a fork", "in a worker"])
def redirected(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The redirection is installed; the list grows when it is first used."""
    uses: list[str] = []
    before = request.param == "before a fork"
    redirect.install(on_first_use=lambda: uses.append("used"), refuse=Refused if before else None)
    yield uses
    redirect.remove()


@pytest.fixture
def before_a_fork() -> Iterator[None]:
    redirect.install(refuse=Refused)
    yield
    redirect.remove()


def is_on_cuda(tensor: torch.Tensor) -> bool:
    answers = {tensor.device == torch.device("cuda", 0), tensor.is_cuda, tensor.get_device() == 0}
    assert len(answers) == 1
    return answers.pop()


def saved(*args: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(torch.ones(3), file, *args)
    file.seek(0)
    return file


def safely_loaded(device: str) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "x.safetensors")
        safetensors.torch.save_file({"x": torch.ones(3)}, path)
        return safetensors.torch.load_file(path, device=device)["x"]


def scripted(module: torch.nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return file


def with_default_device(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_default_device("cuda")
    try:
        return make()
    finally:
        torch.set_default_device(None)


def with_default_type(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    try:
        return make()
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
        torch.set_default_device(None)


def in_context(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.device("cuda"):
        return make()


def in_a_thread(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    torch.ones(1).cuda()
    thread = threading.Thread(target=lambda: found.append(make()))
    thread.start()
    thread.join()
    return found[0]


def x() -> torch.Tensor:
    return torch.ones(3).cuda()


WAYS: dict[str, Callable[[], torch.Tensor]] = {
    ".cuda()": lambda: torch.ones(3).cuda(),
    "safetensors": lambda: safely_loaded("cuda"),
    ".cuda(0)": lambda: torch.ones(3).cuda(0, non_blocking=True),
    ".to(str)": lambda: torch.ones(3).to("cuda"),
    ".to(index)": lambda: torch.ones(3).to("cuda:0", torch.half),
    ".to(int)": lambda: torch.ones(3).to(0),
    ".to(device=)": lambda: torch.ones(3).to(device=torch.device("cuda"), dtype=torch.half),
    ".to(tensor)": lambda: torch.ones(3).to(x()),
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "rand": lambda: torch.rand(3, device=torch.device("cuda:0")),
    "tensor": lambda: torch.tensor([1.0], device="cuda"),
    "as_tensor": lambda: torch.as_tensor(numpy.ones(3), device="cuda"),
    "asarray": lambda: torch.asarray([1.0], device="cuda"),
    "from_numpy": lambda: torch.from_numpy(numpy.ones(3)).cuda(),
    "sparse_coo": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda"),
    "to_sparse": lambda: torch.eye(3).to_sparse().cuda(),
    "zeros_like": lambda: torch.zeros_like(x()),
    "new_zeros": lambda: x().new_zeros(3),
    "new_tensor": lambda: x().new_tensor([1.0]),
    "new": lambda: x().new([1.0]),
    "default device": lambda: with_default_device(lambda: torch.ones(3)),
    "default device, tensor": lambda: with_default_device(lambda: torch.tensor([1.0])),
    "default type": lambda: with_default_type(lambda: torch.ones(3)),
    "context": lambda: in_context(lambda: torch.nn.Linear(2, 2).weight),
    "context, tensor": lambda: in_context(lambda: torch.tensor([1.0])),
    "type": lambda: torch.ones(3).type("torch.cuda.FloatTensor"),
    "type object": lambda: torch.ones(3).type(torch.cuda.HalfTensor),
    "legacy": lambda: torch.cuda.FloatTensor([1, 2]),
    "storage": lambda: torch.empty(0).set_(torch.ones(3).untyped_storage().cuda()),
    "load": lambda: torch.load(saved(), map_location="cuda"),
    "load, bytes": lambda: torch.load(saved(), map_location=torch.device("cuda:0")),
    "load, dict": lambda: torch.load(saved(), map_location={"cpu": "cuda:0"}),
    "load, function": lambda: torch.load(saved(), map_location=lambda storage, place: storage.cuda()),
    "jit.load": lambda: next(torch.jit.load(scripted(torch.nn.Linear(2, 2)), map_location="cuda").parameters()),
    "jit .to": lambda: torch.jit.load(scripted(torch.nn.Linear(2, 2))).to("cuda").weight,
    "jit forward": lambda: torch.jit.load(scripted(torch.nn.Linear(3, 2)), "cuda")(x()),
    "module": lambda: torch.nn.Linear(2, 2).cuda().weight,
    "module.half": lambda: torch.nn.Linear(2, 2).half().to("cuda").bfloat16().weight,
    "buffer": lambda: torch.nn.BatchNorm1d(2).cuda().running_mean,
    "rnn": lambda: torch.nn.LSTM(2, 2).cuda()(torch.ones(1, 2).cuda())[0],
    "deepcopy": lambda: copy.deepcopy(torch.nn.Linear(2, 2).cuda()).weight,
    "view": lambda: x()[1:],
    "computed": lambda: x() * 2,
    "stack": lambda: torch.stack([x(), x()]),
    "one_hot": lambda: torch.nn.functional.one_hot(x().long(), 4),
    "attention": lambda: torch.nn.MultiheadAttention(4, 2).cuda()(*[torch.ones(2, 1, 4).cuda()] * 3)[0],
    "vmap": lambda: torch.func.vmap(lambda row: row * 2)(x()),
    "inference mode": torch.inference_mode()(lambda: torch.zeros(3, device="cuda") + 1),
    "thread": lambda: in_a_thread(lambda: torch.zeros(3, device="cuda")),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3, device="cuda")),
    "compiled": lambda: torch.compile(torch.nn.Linear(3, 2).cuda())(x()),
}
STAYS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(3),
    "cpu": lambda: x().cpu(),
    ".to(cpu)": lambda: x().to("cpu"),
    ".to(tensor)": lambda: x().to(torch.ones(1)),
    "copy_": lambda: torch.empty(3).copy_(x()),
    "zeros_like": lambda: torch.zeros_like(x(), device="cpu"),
    "as_tensor": lambda: torch.as_tensor(x(), device="cpu"),
    "context": lambda: in_context(lambda: torch.ones(3, device="cpu")),
    "load": lambda: torch.load(saved(), map_location="cpu"),
    "module": lambda: torch.nn.Linear(2, 2).cuda().cpu().weight,
    "pin_memory": lambda: torch.ones(3).pin_memory(),
    "pinned": lambda: torch.empty(3, pin_memory=True),
    "meta": lambda: torch.ones(3, device="meta"),
    "type": lambda: x().type("torch.FloatTensor"),
}


@pytest.mark.parametrize("way", WAYS)
@in_a_child
def test_ways_to_cuda(redirected: list[str], way: str) -> None:
    assert is_on_cuda(WAYS[way]())
    assert redirected == ["used"]
    assert not is_on_cuda(torch.ones(3))


@pytest.mark.parametrize("way", STAYS)
@in_a_child
def test_what_stays_on_the_cpu(redirected: list[str], way: str) -> None:
    assert not is_on_cuda(STAYS[way]())


@in_a_child
def test_nothing_happens_before_the_first_use(redirected: list[str]) -> None:
    torch.jit.script(torch.nn.Linear(2, 2))(torch.ones(2))
    torch.tensor([1.0]).to(torch.half)
    assert redirected == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert "device" not in vars(torch.Tensor)


@in_a_child
def test_a_move_to_where_a_tensor_is_gives_the_same_object(redirected: list[str]) -> None:
    tensor = x()
    assert all(moved is tensor for moved in (tensor.cuda(), tensor.to("cuda:0"), tensor.to(tensor), tensor.to(0)))
    assert torch.as_tensor(tensor, device="cuda") is tensor


@in_a_child
def test_a_copy_on_the_cpu_is_a_copy(redirected: list[str]) -> None:
    tensor = x()
    tensor.cpu().add_(1)
    tensor.to("cpu").add_(1)
    assert tensor.tolist() == [1, 1, 1]


@in_a_child
def test_requires_grad_of_what_is_made(redirected: list[str]) -> None:
    leaf = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    assert leaf.is_leaf
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    assert is_on_cuda(leaf.grad)


@in_a_child
def test_numpy_takes_nothing_from_cuda(redirected: list[str]) -> None:
    for take in (lambda: x().numpy(), lambda: numpy.asarray(x())):
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
            take()
    assert x().cpu().numpy().tolist() == x().numpy(force=True).tolist() == [1, 1, 1]


@in_a_child
def test_names_of_types(redirected: list[str]) -> None:
    assert (x().type(), x().half().type(), torch.ones(1).type()) == (
        "torch.cuda.FloatTensor",
        "torch.cuda.HalfTensor",
        "torch.FloatTensor",
    )
    assert isinstance(x(), torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert "device='cuda:0'" in repr(x())


@in_a_child
def test_shared_memory_is_not_for_cuda(redirected: list[str]) -> None:
    assert not x().share_memory_().is_shared()
    assert torch.ones(1).share_memory_().is_shared()


@in_a_child
def test_a_module_that_was_saved_on_cuda_goes_there(redirected: list[str], tmp_path: Path) -> None:
    script = torch.jit.script(torch.nn.Linear(2, 2))
    path = tmp_path / "script.pt"
    torch.jit.save(script, path)
    assert not is_on_cuda(torch.jit.load(path).weight)


@in_a_child
def test_script_may_name_the_factories_that_are_patched(redirected: list[str]) -> None:
    script = torch.jit.script(_with_a_constant)
    assert script(torch.ones(2)).tolist() == [2, 3]


def _with_a_constant(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1.0, 2.0]) + x


@in_a_child
def test_a_compiler_sees_nothing_before_the_first_use(redirected: list[str]) -> None:
    compiled = torch.compile(_with_a_constant, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2).to(torch.float32)).tolist() == [2, 3]


@in_a_child
def test_what_was_compiled_for_cuda_is_compiled_later() -> None:
    graphs: list[object] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    redirect.install(refuse=Refused)
    compiled = torch.compile(torch.nn.Linear(3, 2).cuda(), backend=backend)
    try:
        compiled(x())
        assert graphs == []
    finally:
        redirect.remove()
    compiled(torch.ones(3))
    assert len(graphs) == 1


@in_a_child
def test_queries(redirected: list[str]) -> None:
    cuda = torch.cuda
    assert cuda.current_device() == 0
    for harmless in (
        cuda.init,
        cuda.synchronize,
        cuda.empty_cache,
        lambda: cuda.manual_seed(1),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: cuda.set_device(0),
    ):
        assert harmless() is None
    properties = cuda.get_device_properties(0)
    assert properties.name == cuda.get_device_name()
    assert cuda.get_device_capability() == (properties.major, properties.minor)
    free, total = cuda.mem_get_info()
    assert 0 < free <= total == properties.total_memory
    assert cuda.memory_allocated() == 0
    with pytest.raises(AttributeError, match="before CUDA runs"):
        properties.warp_size  # noqa: B018
    with cuda.device(0):
        assert is_on_cuda(x())


@in_a_child
def test_a_second_gpu_is_not_there(redirected: list[str]) -> None:
    for use in (
        lambda: torch.ones(1).to("cuda:1"),
        lambda: torch.ones(1, device="cuda:1"),
        lambda: torch.cuda.set_device(1),
    ):
        with pytest.raises(RuntimeError, match="cuda:1 is not there, every worker sees one GPU"):
            use()


@in_a_child
def test_generators(redirected: list[str]) -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.rand(1, generator=torch.Generator().manual_seed(1)).shape == (1,)
    if redirect.refuse:
        with pytest.raises(Refused, match="Generator"):
            torch.Generator(device="cuda")
    else:
        torch.rand(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2)),
        lambda: torch.jit.trace(torch.nn.Linear(3, 2).cuda(), x()),
        lambda: torch.jit.freeze(torch.jit.script(torch.nn.Linear(3, 2).cuda().eval())),
        lambda: torch.jit.load(_frozen(), map_location="cuda"),
    ],
    ids=["DataParallel", "trace", "freeze", "frozen"],
)
@in_a_child
def test_what_is_refused_before_a_fork(before_a_fork: None, use: Callable[[], object]) -> None:
    with pytest.raises(Refused):
        use()


def _frozen() -> io.BytesIO:
    file = io.BytesIO()
    module: Any = torch.jit.freeze(torch.jit.script(torch.nn.Linear(3, 2).eval()))
    torch.jit.save(module, file)
    file.seek(0)
    return file


@in_a_child
def test_trace_on_the_cpu_is_not_refused(before_a_fork: None) -> None:
    torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(3))


@in_a_child
def test_all_is_undone() -> None:
    def state() -> object:
        return torch.tensor, torch.load, torch.jit.load, torch.compile, torch.Generator, dict(vars(torch.Tensor))

    before = state()
    redirect.install(refuse=None)
    kept = x()
    torch.compile(torch.nn.Linear(2, 2).cuda())
    redirect.remove()
    assert before == (
        torch.tensor,
        torch.load,
        torch.jit.load,
        torch.compile,
        torch.Generator,
        dict(vars(torch.Tensor)),
    )
    assert kept.device.type == "cpu"
    assert marks.is_marked(kept)
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@in_a_child
def test_another_mode_of_the_app_stays_when_the_redirection_goes() -> None:
    class Other(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    redirect.install(refuse=None)
    x()
    with Other() as other:
        redirect.remove()
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [other]


@in_a_child
def test_marks_go_with_their_memory(before_a_fork: None) -> None:
    living = len(marks.living_storages())
    tensor = x()
    view = tensor[1:]
    del tensor
    assert len(marks.living_storages()) == living + 1
    del view
    assert len(marks.living_storages()) == living


def test_a_compiler_that_was_loaded_meanwhile_knows_torchs_own_functions() -> None:
    code = """
import torch
from gpuworker.standin import redirect
redirect.install(refuse=None)
torch.compile(torch.nn.Linear(2, 2).cuda(), backend="eager")(torch.ones(2).cuda())
redirect.remove()

@torch.compile(fullgraph=True, backend="eager")
def f(x):
    return torch.tensor([1.0]) + torch.zeros(1) + torch.empty(1).fill_(x.to(torch.float32).item()) * torch.as_tensor(x)

torch._dynamo.config.capture_scalar_outputs = True
f(torch.ones(1))
torch.set_default_device("meta")
print(torch.tensor([1.0]).device, torch.empty(1).device)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.stdout.split() == ["meta", "meta"], done.stderr
