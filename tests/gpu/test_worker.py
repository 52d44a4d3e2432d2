"""The promises of the worker class on a real GPU."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import GPUS, processes_on
from tests.live.server import Load, Server, is_running, wait_until

Make = Callable[..., Server]

APP = """
import os, torch
import where
app = where.app
{before}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).{move}
@app.get("/infer")
def infer():
    with torch.inference_mode():
        out = model(torch.ones(4, 1024, device="cuda"))
    properties = torch.cuda.get_device_properties(0)
    return {{"pid": os.getpid(), "sum": out.double().sum().item(), "count": torch.cuda.device_count(),
             "visible": os.environ["CUDA_VISIBLE_DEVICES"], "device": str(out.device)}}
"""


def write_app(tmp_path: Path, move: str = 'to("cuda")', before: str = "") -> str:
    (tmp_path / "gpu_app.py").write_text(APP.format(move=move, before=before))
    return "gpu_app:app"


def gpu_server(make_server: Make, tmp_path: Path, *args: str, **kwargs: object) -> Server:
    return make_server(write_app(tmp_path), *args, **{"devices": None, **kwargs})


def test_every_worker_serves_on_its_gpu_and_the_arbiter_on_none(make_server: Make, tmp_path: Path) -> None:
    server = gpu_server(make_server, tmp_path, workers=8)
    server.wait_for_workers(8)
    answers = {answer["pid"]: answer for answer in (server.json("/infer") for _ in range(64))}
    assert len({answer["sum"] for answer in answers.values()}) == 1
    assert {answer["count"] for answer in answers.values()} == {1}
    assert {answer["device"] for answer in answers.values()} == {"cuda:0"}
    for slot, uuid in re.findall(r"Slot (\d+) on device \d+ \(.*, (GPU-[\w-]+)\) ready", server.log):
        assert uuid == GPUS[int(slot) % len(GPUS)].uuid
    on_gpus = set().union(*(processes_on(index) for index in range(len(GPUS))))
    assert server.pid not in on_gpus
    # NVML may give the pids of another namespace; then their number must do.
    assert on_gpus >= server.worker_pids() or len(on_gpus) >= 8


def test_crashes_and_reloads(make_server: Make, tmp_path: Path) -> None:
    server = gpu_server(make_server, tmp_path, workers=3)
    chance = random.Random(2)
    for _ in range(10):
        workers = server.wait_for_workers(3)
        os.kill(workers[chance.randrange(3)].pid, signal.SIGKILL)
        wait_until(lambda old=workers: not all(is_running(w.pid) for w in old.values()), "the kill")
    workers = server.wait_for_workers(3)
    with Load(server, path="/infer") as load:
        for _ in range(3):
            server.reload()
    assert load.failures == []
    server.wait_for_workers(3)


@pytest.mark.parametrize(
    "move", ["cuda()", 'to("cuda:0")', "to(__import__('gpuworker').device())", "half().cuda().float()"]
)
def test_ways_to_the_gpu_without_preload(make_server: Make, tmp_path: Path, move: str) -> None:
    server = make_server(write_app(tmp_path, move), devices=None).wait_ready()
    assert server.json("/infer")["device"] == "cuda:0"


def test_an_availability_check_in_config_and_app(make_server: Make, tmp_path: Path) -> None:
    before = "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nassert device == 'cuda'"
    config = "import torch\nassert torch.cuda.device_count() > 0\n"
    server = make_server(write_app(tmp_path, "to(device)", before), config=config, devices=None).wait_ready()
    assert server.json("/infer")["device"] == "cuda:0"


def test_an_availability_check_in_a_preloaded_app(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import torch\nimport where\napp = where.app\nassert torch.cuda.is_available()\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for p in model.parameters():\n    p.grad = torch.ones_like(p)\noptimizer.step()\n"
        "@app.get('/infer')\ndef infer():\n"
        "    return {'sum': model.cuda()(torch.ones(2, 4, device='cuda')).sum().item()}\n"
    )
    server = make_server("asks:app", "--preload", devices=None).wait_ready()
    server.json("/infer")


USES = [
    "torch.cuda.Stream()",
    "torch.cuda.CUDAGraph()",
    "torch.cuda.current_stream()",
    "torch.cuda.get_rng_state()",
    "torch.ones(3, requires_grad=True).sum().backward()",
    # Missed before it happens, found in the driver.
    'torch.Stream("cuda")',
    "torch.zeros(1, pin_memory=True)",
]


@pytest.mark.parametrize("use", USES)
def test_cuda_in_the_arbiter_stops_the_start(make_server: Make, tmp_path: Path, use: str) -> None:
    (tmp_path / "early.py").write_text(f"import torch\nfrom where import app\nx = {use}\n")
    server = make_server("early:app", "--preload", devices=None)
    assert server.wait() == 1
    assert "CUDA must not start before the fork" in server.log or "CUDA was started in gunicorn's arbiter" in server.log
    if use not in USES[-2:]:
        assert f"x = {use}" in server.log
    assert "Booting worker" not in server.log


def test_cuda_in_the_config_file_stops_the_start(make_server: Make) -> None:
    server = make_server(config="import torch\ntorch.zeros(1).cuda()\n", devices=None)
    assert server.wait() == 1
    assert "CUDA was started in gunicorn's arbiter" in server.log
    assert "Booting worker" not in server.log


@pytest.mark.parametrize("form", ["index", "uuid", "short uuid"])
@pytest.mark.parametrize("where", ["environment", "raw_env"])
def test_the_operators_token_reaches_the_worker_as_it_is(
    make_server: Make, tmp_path: Path, form: str, where: str
) -> None:
    uuid = GPUS[-1].uuid
    token = {"index": str(len(GPUS) - 1), "uuid": uuid, "short uuid": uuid[:12]}[form]
    config = f'raw_env = ["CUDA_VISIBLE_DEVICES={token}"]\n' if where == "raw_env" else ""
    env = {} if where == "raw_env" else {"CUDA_VISIBLE_DEVICES": token}
    server = gpu_server(make_server, tmp_path, workers=1, config=config, env=env).wait_ready(1)
    assert server.json("/infer")["visible"] == token
    server.wait_for_log(f"Slot 0 on device 0 .*{uuid}.* ready")


def test_a_device_that_is_not_there(make_server: Make, tmp_path: Path) -> None:
    server = gpu_server(make_server, tmp_path, env={"CUDA_VISIBLE_DEVICES": f"{len(GPUS)}"})
    assert server.wait() == 1
    assert f"there is no device '{len(GPUS)}'" in server.log
    assert GPUS[0].uuid in server.log


def test_cpu_when_the_operator_says_so(make_server: Make) -> None:
    server = make_server(devices="cpu").wait_ready()
    assert server.json("/state")["at_import"]["device"] == "cpu"
    assert not processes_on() & server.worker_pids()


def test_all_is_free_when_the_arbiter_is_killed(make_server: Make, tmp_path: Path) -> None:
    server = gpu_server(make_server, tmp_path, "--timeout", "600", workers=4)
    workers = {worker.pid for worker in server.wait_for_workers(4).values()}
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(is_running, workers)), "the workers to leave", 20)


def test_another_user(make_server: Make, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory not in (Path("/"), Path("/tmp")):
            directory.chmod(0o755)
    # bare: no import after the change of user, which may not be allowed to read root's python. CUDA starts after it.
    server = make_server("bare:app", "--preload", "--user", "nobody", devices=None).wait_ready()
    assert server.json("/")["device"] == "cuda:0"


def test_the_digits_demo_on_the_gpu(make_server: Make) -> None:
    import subprocess
    import sys

    from tests.live.server import REPOSITORY

    example = REPOSITORY / "docs" / "examples" / "digits"
    if not (example / "digits.safetensors").exists():
        subprocess.run([sys.executable, example / "train.py"], check=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    demo = subprocess.run([sys.executable, example / "demo.py"], capture_output=True, text=True, env=env, check=False)
    print(demo.stdout)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "cuda:0" in demo.stdout
