"""One copy of the weights on a real GPU."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import used_bytes
from tests.live.server import Server, is_running, wait_until

Make = Callable[..., Server]
MIB = 2**20
#: What a worker may cost: its context (526 MiB), the kernels of cuBLAS and cuDNN, torch's small allocations.
WORKER = 1000 * MIB

APP = """
import os, warnings
import torch, gpuworker, where
app = where.app
warnings.simplefilter("error", UserWarning)
GIB = float(os.environ.get("GIB", "1"))

def load():
    with open(os.path.join(os.environ["HOME"], "loads"), "a") as loads:
        loads.write(f"{{os.getpid()}}\\n")
    torch.manual_seed(0)
    side = 8192
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side, bias=False) for _ in range(max(1, round(GIB * 4)))])
    return model.eval(){move}

model = gpuworker.share(load, files={files})

@gpuworker.share
def recurrent():
    torch.manual_seed(1)
    return torch.nn.LSTM(64, 64, num_layers=2, bidirectional=True).eval()

@app.get("/infer")
def infer():
    with torch.inference_mode():
        out = model(torch.ones(2, 8192, device="cuda"))
        state = recurrent(torch.ones(3, 1, 64, device="cuda"))[0]
    return {{"pid": os.getpid(), "sum": out.double().sum().item(), "state": state.double().sum().item(),
             "device": str(next(model.parameters()).device), "grad": next(model.parameters()).requires_grad}}

@app.get("/direct")
def direct():
    fresh, lstm = load().cuda(), None
    torch.manual_seed(1)
    lstm = torch.nn.LSTM(64, 64, num_layers=2, bidirectional=True).eval().cuda()
    with torch.inference_mode():
        equal = all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values()))
        x = torch.ones(2, 8192, device="cuda")
        y = torch.ones(3, 1, 64, device="cuda")
        same = torch.equal(fresh(x), model(x)) and torch.equal(lstm(y)[0], recurrent(y)[0])
    del fresh
    torch.cuda.empty_cache()
    return {{"equal": equal, "same": same}}

@app.get("/write")
def write():
    try:
        next(model.parameters()).add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {{"pid": os.getpid(), "error": str(error)}}
    return {{"pid": os.getpid(), "error": None}}
"""


def shared_server(
    make_server: Make, tmp_path: Path, *args: str, move: str = "", files: str = "()", gib: float = 1, **kwargs: object
) -> Server:
    (tmp_path / "sharing.py").write_text(APP.format(move=move, files=files))
    env = {"GIB": str(gib), **kwargs.pop("env", {})}  # type: ignore[dict-item]
    return make_server("sharing:app", *args, devices=None, env=env, **kwargs)


def loads(tmp_path: Path) -> int:
    return len((tmp_path / "loads").read_text().split())


@pytest.mark.parametrize("move", ["", ".cuda()"])
def test_one_copy_for_all_workers(make_server: Make, tmp_path: Path, move: str) -> None:
    before = used_bytes()
    server = shared_server(make_server, tmp_path, workers=1, move=move, gib=4).wait_ready(1)
    server.json("/infer")
    for workers in range(2, 9):
        server.signal(signal.SIGTTIN)
        server.wait_ready(workers)
        answers = {(answer["sum"], answer["state"]) for answer in (server.json("/infer") for _ in range(32))}
        assert len(answers) == 1
        used = used_bytes() - before
        print(f"{workers} workers: {used / MIB:.0f} MiB")
        assert used < 4096 * MIB + workers * WORKER
    assert loads(tmp_path) == 1


def test_the_same_numbers_as_a_fresh_load(make_server: Make, tmp_path: Path) -> None:
    server = shared_server(make_server, tmp_path, gib=0.5).wait_ready()
    assert server.json("/direct") == {"equal": True, "same": True}
    answer = server.json("/infer")
    assert (answer["device"], answer["grad"]) == ("cuda:0", False)


def test_a_replacement_attaches(make_server: Make, tmp_path: Path) -> None:
    server = shared_server(make_server, tmp_path, gib=4).wait_ready()
    for round_ in range(1, 6):
        os.kill(max(server.worker_pids()), signal.SIGKILL)
        server.wait_ready(2 + round_)
    assert loads(tmp_path) == 1
    times = [float(found) for found in re.findall(r"weights ([\d.]+) s", server.log)]
    print("weights of the first and of those that attached:", times)
    server.json("/infer")


def test_a_write_stays_with_the_writer(make_server: Make, tmp_path: Path) -> None:
    server = shared_server(make_server, tmp_path, gib=0.5).wait_ready()
    right = server.json("/infer")["sum"]
    writer = server.json("/write")
    assert "illegal" in writer["error"] or "invalid" in writer["error"]
    os.kill(writer["pid"], signal.SIGKILL)  # its context is lost
    server.wait_ready(3)
    assert {server.json("/infer")["sum"] for _ in range(16)} == {right}
    assert loads(tmp_path) == 1


def test_reloads_return_to_one_copy(make_server: Make, tmp_path: Path) -> None:
    before = used_bytes()
    server = shared_server(make_server, tmp_path).wait_ready()
    for _ in range(4):
        server.reload()
    limit = before + 1024 * MIB + 2 * WORKER
    wait_until(lambda: used_bytes() < limit, "the weights of old generations to go", 30)
    assert loads(tmp_path) == 5


def test_weights_outlive_a_reload_when_their_files_stay(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    server = shared_server(make_server, tmp_path, files=repr([str(tmp_path / "weights")])).wait_ready()
    for expected in (1, 2):
        server.reload()
        assert loads(tmp_path) == expected
        (tmp_path / "weights").write_text("22")


def test_expandable_segments(make_server: Make, tmp_path: Path) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    server = shared_server(make_server, tmp_path, gib=0.5, move=".cuda()", env=env).wait_ready()
    os.kill(max(server.worker_pids()), signal.SIGKILL)
    server.wait_ready(3)
    assert len({server.json("/infer")["sum"] for _ in range(16)}) == 1
    assert loads(tmp_path) == 1


def test_a_preloaded_app_with_another_user(make_server: Make, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory not in (Path("/"), Path("/tmp")):
            directory.chmod(0o777)
    args = ("--preload", "--user", "nobody")
    server = shared_server(make_server, tmp_path, *args, gib=0.5).wait_ready()
    assert loads(tmp_path) == 1
    assert "Loaded" in server.log


def test_all_is_free_after_kill_9_of_the_arbiter(make_server: Make, tmp_path: Path) -> None:
    server = shared_server(make_server, tmp_path, "--timeout", "600").wait_ready()
    workers = server.worker_pids()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(is_running, workers)), "the workers to leave", 20)


def test_too_much_says_what_is_needed_and_what_is_free() -> None:
    import subprocess
    import sys

    code = "from gpuworker.weights.cuda import CudaArena; CudaArena().create(10**12)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(r"need 931\.32 GiB on NVIDIA .* has [\d.]+ of [\d.]+ GiB free", ended.stderr), ended.stderr


def test_models_of_the_field() -> None:
    """transformers and timm models with random weights, packed, put into an arena and attached in one process."""
    import subprocess
    import sys

    ended = subprocess.run([sys.executable, "-m", "tests.gpu.models"], capture_output=True, text=True, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
