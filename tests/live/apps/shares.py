"""Shares one network, of MEGABYTES in PARAMETERS pieces; how its loader fares is told by files in $HOME."""

import hashlib
import os
import time
from pathlib import Path

import flask
import torch
import where
from werkzeug.local import LocalProxy

import gpuworker

app = where.app
home = Path(os.environ["HOME"])
seed = home / "seed"
GENEROUS = 120.0


class Net(torch.nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        torch.manual_seed(value)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 10)
        )
        pieces = int(os.environ.get("PARAMETERS", "1"))
        each = int(os.environ.get("MEGABYTES", "1")) * 2**20 // 4 // pieces
        self.ballast = torch.nn.ParameterList(torch.full((each,), float(value)) for _ in range(pieces))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.ballast[0][:10]


def load() -> Net:
    device = (gpuworker.slot() or 0) % 2
    with (home / "loads").open("a") as loads:
        loads.write(f"{device} {os.getpid()}\n")
    if "MEET" in os.environ:
        (home / f"loading-{device}").touch()
        end = time.monotonic() + GENEROUS
        while not (home / f"loading-{1 - device}").exists():
            if time.monotonic() > end:
                raise TimeoutError("the loader of the other device did not start")
            time.sleep(0.02)
    time.sleep(float(os.environ.get("LOAD_SECONDS", "0")))
    while (home / "hang").exists():
        time.sleep(0.02)
    if (home / "hang-once").exists():
        (home / "hang-once").unlink()
        while True:
            time.sleep(0.5)
    if (home / "fail").exists():
        raise ValueError("the weights are not there")
    if (home / "fail-once").exists():
        (home / "fail-once").unlink()
        raise ValueError("the weights are not there yet")
    return Net(int(seed.read_text()) if seed.exists() else 0).eval()


KEPT_BY = {
    "nothing": {},
    "files": {"files": [seed]},
    "version": {"version": seed.read_text},
}
name = home / "name"
net = gpuworker.share(
    load, name=name.read_text() if name.exists() else None, **KEPT_BY[os.environ.get("KEPT_BY", "nothing")]
)


def digest() -> str:
    """Of the bits of a forward pass."""
    x = torch.linspace(-3, 3, 32 * 64).reshape(32, 64)
    return hashlib.sha256(net(x).detach().numpy().tobytes()).hexdigest()


@app.before_request
def hold() -> None:
    if flask.request.path != "/where":
        time.sleep(float(flask.request.args.get("hold", 0)))


@app.get("/answer")
def answer() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "slot": gpuworker.slot(),
        "digest": digest(),
        "seed": net.ballast[-1][-1].item(),
        "class": type(net).__name__,
        "proxy": isinstance(net, LocalProxy),
        "instance": isinstance(net, Net),
        "requires_grad": any(parameter.requires_grad for parameter in net.parameters()),
    }


@app.get("/read")
def read() -> dict[str, object]:
    """Every byte of the weights."""
    return {"pid": os.getpid(), "sum": sum(piece.double().sum().item() for piece in net.ballast)}


@app.get("/add")
def add() -> dict[str, object]:
    with torch.no_grad():
        net.body[0].weight.add_(1)
    return {"pid": os.getpid()}
