"""Real asserts, illegal writes and lack of memory on a real GPU: nothing is simulated."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import used_bytes
from tests.live.server import Load, Server, wait_until

Make = Callable[..., Server]
MIB = 2**20

APP = """
import os, flask, torch, gpuworker
app = flask.Flask(__name__)

@gpuworker.share
def model():
    with open(os.path.join(os.environ["HOME"], "loads"), "a") as loads:
        loads.write("x")
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(1000, 4096), torch.nn.Linear(4096, 4096)).eval()

@app.get("/infer")
def infer():
    with torch.inference_mode():
        out = model(torch.arange(8, device="cuda"))
    return {"pid": os.getpid(), "out": out.double().sum().item().hex()}

@app.get("/assert")
def fail():
    with torch.inference_mode():
        return {"out": model(torch.tensor([10**6], device="cuda")).sum().item()}

@app.get("/silent")
def silent():
    "The answer does not wait for the kernel."
    model(torch.tensor([10**6], device="cuda"))
    return {"pid": os.getpid()}

@app.get("/write")
def write():
    with torch.no_grad():
        model[1].weight.mul_(2)
    return {"sum": model[1].weight.sum().item()}

@app.get("/oom")
def oom():
    kept = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(int(flask.request.args["gib"]))]
    return {"never": len(kept)}
"""
HANDLER = "app.register_error_handler(torch.cuda.OutOfMemoryError, gpuworker.out_of_memory)\n"


def faulty(make_server: Make, tmp_path: Path, more: str = "", **kwargs: Any) -> Server:
    (tmp_path / "faulty_gpu.py").write_text(APP + more)
    server = make_server("faulty_gpu:app", devices=None, **kwargs)
    return server.wait_ready(kwargs.get("workers", 2))


def infer(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.json("/infer")
    return answer


@pytest.mark.parametrize("path", ["/assert", "/write"])
def test_a_broken_context_costs_one_request_and_no_load(make_server: Make, tmp_path: Path, path: str) -> None:
    server = faulty(make_server, tmp_path)
    right = infer(server)["out"]
    with Load(server, clients=2, path="/infer") as load:
        status, _ = server.get(path)
        assert status >= 500
        server.wait_for_log(r"Slot \d on .* ready", 3)
    assert len(load.failures) <= 1, load.failures
    assert {infer(server)["out"] for _ in range(16)} == {right}
    assert (tmp_path / "loads").read_text() == "x"
    server.wait_for_log(rf"Slot \d has lost its device over GET {path}: .*CUDA error")
    assert ("shared weights are read-only" in server.log) == (path == "/write")


def test_an_error_that_nobody_waited_for_shows_in_the_next_request(make_server: Make, tmp_path: Path) -> None:
    server = faulty(make_server, tmp_path, workers=1)
    right = infer(server)["out"]
    outcomes = []

    def replaced() -> bool:
        try:
            status, _ = server.get("/silent" if not outcomes else "/infer")
            outcomes.append(status)
        except (OSError, http.client.HTTPException):
            outcomes.append(0)
        return "has lost its device" in server.log and server.log.count("ready in") == 2

    wait_until(replaced, "the worker to be replaced")
    assert infer(server)["out"] == right
    assert sum(status >= 500 for status in outcomes) <= 2, outcomes


@pytest.mark.parametrize("more", ["", HANDLER], ids=["500", "503"])
def test_memory_comes_back_after_too_large_a_request(make_server: Make, tmp_path: Path, more: str) -> None:
    server = faulty(make_server, tmp_path, more)
    infer(server)
    pids = server.worker_pids()
    before = used_bytes()
    for _ in range(2):
        status, _ = server.get("/oom?gib=400")
        assert status == (503 if more else 500)
        wait_until(lambda: used_bytes() <= before * 1.05 + 64 * MIB, "the memory to come back")
    infer(server)
    assert server.worker_pids() == pids, "nobody had to leave"
