"""Shares objects of several kinds, and does with a module what apps do with modules."""

import copy
import io
import os
import time
from pathlib import Path

import flask
import torch
import where

import gpuworker

app = where.app


class Counter:
    def __init__(self) -> None:
        self.calls = torch.zeros(1, dtype=torch.int64)
        self.name = "calls"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 512)
        self.second = torch.nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def note(kind: str) -> None:
    with Path(os.environ["HOME"], "loads").open("a") as loads:
        loads.write(f"{kind} {os.getpid()}\n")
    torch.manual_seed(0)


def load_module() -> Net:
    note("module")
    return Net().eval()


module = gpuworker.share(load_module)


@gpuworker.share()
def state_dict() -> dict[str, torch.Tensor]:
    note("state_dict")
    return Net().state_dict()


@gpuworker.share(name="a pair")
def pair() -> tuple[Net, Counter]:
    note("pair")
    return Net().eval(), Counter()


tensor = gpuworker.share(lambda: (note("tensor"), torch.arange(300_000.0))[1], name="tensor")


@app.before_request
def hold() -> None:
    if flask.request.path != "/where":
        time.sleep(float(flask.request.args.get("hold", 0)))


@app.get("/objects")
def objects() -> dict[str, object]:
    """Whether each object is what its loader made."""
    torch.manual_seed(0)
    fresh, x = Net().eval(), torch.ones(4, 64)
    return {
        "pid": os.getpid(),
        "module": type(module) is Net and module(x).equal(fresh(x)),
        "state_dict": type(state_dict) is type(fresh.state_dict())
        and list(state_dict) == list(fresh.state_dict())
        and all(value.equal(fresh.state_dict()[key]) for key, value in state_dict.items()),
        "pair": type(pair) is tuple
        and type(pair[0]) is Net
        and pair[0](x).equal(fresh(x))
        and type(pair[1]) is Counter
        and pair[1].name == "calls"
        and pair[1].calls.item() == 0,
        "tensor": type(tensor) is torch.Tensor and tensor.equal(torch.arange(300_000.0)),
    }


def saved_bytes(what: object) -> int:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getbuffer().nbytes


@app.get("/real")
def real() -> dict[str, object]:
    """Whether the module can be used like any other."""
    x = torch.ones(4, 64)
    expected = module(x)
    own = sum(value.nbytes for value in module.state_dict().values())

    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.first.weight.add_(1)

    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    loaded = Net()
    loaded.load_state_dict(torch.load(io.BytesIO(file.getvalue())))

    doubled = {name: value * 2 for name, value in module.state_dict().items()}
    heavy = Net()
    heavy.load_state_dict(doubled)

    seen = []
    handle = module.register_forward_hook(lambda *args: seen.append("hook"))
    module(x)
    handle.remove()
    module(x)

    return {
        "pid": os.getpid(),
        "type": type(module) is Net,
        "deepcopy": type(twin) is Net and not twin(x).equal(expected) and module(x).equal(expected),
        "state_dict": loaded(x).equal(expected),
        "save": file.getbuffer().nbytes < own + 8192,
        "save_one": saved_bytes(module.first.bias) < module.first.bias.nbytes + 8192,
        "save_module": saved_bytes(module) < own + 8192,
        "functional_call": torch.func.functional_call(module, doubled, (x,)).equal(heavy(x)),
        "hook": seen == ["hook"],
        "compile": torch.compile(module, backend="eager")(x).equal(expected),
    }
