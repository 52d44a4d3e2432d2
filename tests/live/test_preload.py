"""--preload: what an app put on cuda while the arbiter imported it is moved in the workers, or refused by name."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server
from tests.live.test_share import ask_each, kill, one_after_the_other, pss

Make = Callable[..., Server]

#: Every place where a tensor can be.
PLACES = """
import functools, gc, os, types
import flask, torch
torch.manual_seed(0)
weight = torch.rand(600, 600)

class Slots:
    __slots__ = ("tensor",)

class Thing:
    pass

def closure(tensor):
    return lambda: tensor

device = torch.device("cuda" if torch.cuda.is_available() else "cuda:0")
plain = weight.to(device)
view, transposed = plain[3:5], plain.t()
slots, thing = Slots(), Thing()
slots.tensor, thing.attribute = weight.cuda(), {"deep": [(weight.cuda(),)]}
enclosed, partial = closure(weight.cuda()), functools.partial(torch.mul, weight.cuda())
module = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600)).cuda().eval()
module[0].tied = module[0].weight
module.register_buffer("cache", torch.zeros(3), persistent=False)
module.cuda()
script = torch.jit.script(torch.nn.Linear(600, 3)).cuda().eval()
sparse = torch.eye(3).to_sparse().cuda()
negative = torch.view_as_complex(torch.rand(3, 2)).cuda().conj()
doubled, stacked, cloned = plain * 2, torch.stack([plain[0], plain[1]]), plain.clone()
with torch.inference_mode():
    frozen = plain + 1
empty = torch.empty(0, device="cuda")
scratch = torch.zeros(600, 600, device="cuda")
left = weight.clone()
gc.freeze()
app = flask.Flask(__name__)
TENSORS = {
    "plain": plain, "view": view, "transposed": transposed, "slots": slots.tensor, "enclosed": enclosed(),
    "deep": thing.attribute["deep"][0][0], "partial": partial.args[0], "weight": module[0].weight,
    "mean": module[1].running_mean, "cache": module.cache, "script": script.weight, "sparse": sparse,
    "negative": negative, "doubled": doubled, "stacked": stacked, "cloned": cloned, "frozen": frozen, "empty": empty,
    "scratch": scratch,
}

@app.get("/look")
def look():
    with torch.inference_mode():
        out = module(plain)[:, :3] + script(plain) + partial(view[:1])[:, :3]
        scratch.add_(1)
        module.cache.add_(1)
    return {
        "pid": os.getpid(),
        "elsewhere": [name for name, tensor in TENSORS.items() if not tensor.is_cuda or str(tensor.device) != "cuda:0"],
        "left": str(left.device), "scratch": scratch[0, 0].item(),
        "ties": [view.data_ptr() == plain[3:].data_ptr(), module[0].tied is module[0].weight, view._base is plain],
        "values": bool(torch.equal(plain.cpu(), left) and torch.equal(doubled.cpu(), left * 2)
                       and torch.equal(frozen.cpu(), left + 1) and sparse.to_dense().trace() == 3
                       and negative.is_conj() and plain.mean(0)[0].item() == left.mean(0)[0].item()),
        "out": out.double().sum().item().hex(), "grad": module[0].weight.requires_grad,
    }
"""


def look(server: Server, workers: int) -> dict[int, dict[str, Any]]:
    return ask_each(server, workers, "/look")


def good(answer: dict[str, Any]) -> bool:
    return (
        answer["elsewhere"] == []
        and answer["left"] == "cpu"
        and answer["values"]
        and all(answer["ties"])
        and answer["grad"]
    )


def test_the_very_tensors_are_on_the_device_of_each_worker(make_server: Make, tmp_path: Path, gunicorn: Path) -> None:
    (tmp_path / "places.py").write_text(PLACES + HOLD)
    server = make_server("places:app", "--preload", workers=3, devices="cpu,cpu", gunicorn=gunicorn)
    answers = look(server, 3)
    assert all(map(good, answers.values())), answers
    assert len({answer["out"] for answer in answers.values()}) == 1
    kill(max(answers))
    server.reload()
    again = look(server, 3)
    assert all(map(good, again.values())), again
    assert {answer["out"] for answer in again.values()} == {answer["out"] for answer in answers.values()}
    assert server.log.count("Loaded the preloaded app") == 2, "once for each device"
    assert server.log.count("this server runs on the CPU") == 1


HOLD = """
@app.before_request
def hold():
    import time
    time.sleep(float(flask.request.args.get("hold", 0)))
"""


def test_what_models_write_to_is_of_each_worker(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(PLACES + HOLD)
    server = make_server("places:app", "--preload", devices="cpu")
    counts: dict[int, list[float]] = {}
    for _ in range(4):
        answer = server.json("/look")
        counts.setdefault(answer["pid"], []).append(answer["scratch"])
    assert all(found == [float(number) for number in range(1, len(found) + 1)] for found in counts.values())


@pytest.mark.parametrize("preload", [True, False], ids=["preload", "plain"])
def test_in_the_request_threads_too(make_server: Make, tmp_path: Path, preload: bool) -> None:
    (tmp_path / "places.py").write_text(PLACES + HOLD)
    args = ("--threads", "2", *(["--preload"] if preload else []))
    server = make_server("places:app", *args, worker="gpuworker.CudaThreadWorker", workers=1, devices="cpu")
    assert good(server.json("/look"))
    assert good(server.json("/look"))


BIG = """
import os, flask, torch
app = flask.Flask(__name__)
model = torch.nn.Linear(4096, 8192, bias=False).cuda()
%s

@app.get("/read")
def read():
    return {"pid": os.getpid(), "sum": model.weight.sum().item()}
"""


@one_after_the_other
def test_more_workers_cost_no_more_copies(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(BIG % HOLD)
    server = make_server("big:app", "--preload", workers=2, devices="cpu", env={"OMP_NUM_THREADS": "1"})
    ask_each(server, 2, "/read")
    two = pss(server)
    for workers in (3, 4):
        server.signal(signal.SIGTTIN)
        ask_each(server, workers, "/read")
    assert pss(server) - two < 2 * 100, "of 128 MiB of weights each"
    assert "would save" not in server.log


def test_what_could_be_saved_is_said_once(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(BIG % HOLD)
    server = make_server("big:app", workers=3, devices="cpu")
    answers = ask_each(server, 3, "/read")
    assert server.log.count("would save 0.25 GiB: load the model with gpuworker.share(), or use --preload") == 1
    for pid in answers:
        kill(pid)
    ask_each(server, 3, "/read")
    assert server.log.count("would save") == 1


REFUSED = {
    "a timer": (
        "import threading\ndef work(): pass\ntimer = threading.Timer(600, work)\ntimer.daemon = True\ntimer.start()",
        r"The app started a thread .* would be lost .*\n  File \"{app}\", line \d+",
    ),
    "a thread": (
        "import threading, time\ndef work():\n    time.sleep(600)\nthreading.Thread(target=work, daemon=True).start()",
        r"The app started a thread .* would be lost .*\n  File \"{app}\", line \d+",
    ),
    "a pool of threads": (
        "import multiprocessing.pool\npool = multiprocessing.pool.ThreadPool(1)\npool.map(len, ['x'])",
        r"The app started a thread .*\n  multiprocessing\.pool\.ThreadPool",
    ),
    "saved for backward": (
        "y = torch.nn.Linear(3, 3).cuda()(torch.ones(3).cuda())",
        r"early\.y was computed with gradients",
    ),
    "in a list": (
        "class Thing: pass\nthing = Thing()\nthing.found = [1, {'a': torch.eye(3).to_sparse_csr().cuda()}]",
        r"early\.thing\.found\[1\]\.a \(torch\.sparse_csr\) cannot be moved",
    ),
    "a storage": (
        "kept = torch.ones(3).untyped_storage().cuda()",
        r"12 bytes that the app put on the GPU .*\n  File \"{app}\", line 3: kept = torch",
    ),
    "another GPU": (
        "x = torch.ones(1).to('cuda:1')",
        r"cuda:1 is not there, every worker sees one GPU.*\n  File \"{app}\"",
    ),
    "DataParallel": (
        "m = torch.nn.DataParallel(torch.nn.Linear(2, 2))",
        r"DataParallel has no use .*\n  File \"{app}\"",
    ),
    "trace": (
        "m = torch.jit.trace(torch.nn.Linear(2, 2).cuda(), torch.ones(2).cuda())",
        r"torch\.jit\.trace would write .*\n  File \"{app}\"",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(make_server: Make, tmp_path: Path, what: str) -> None:
    code, message = REFUSED[what]
    early = tmp_path / "early.py"
    early.write_text(f"import torch\nfrom where import app\n{code}\n")
    server = make_server("early:app", "--preload")
    assert server.wait() == 1
    assert re.search(message.replace("{app}", re.escape(str(early))), server.log), server.log
    assert "without --preload" in server.log
    assert "Traceback" not in server.log
    assert "Booting worker" not in server.log


def test_an_app_that_sets_the_start_method_of_its_children(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(
        "import torch.multiprocessing\ntorch.multiprocessing.set_start_method('spawn', force=True)\n"
        "from where import app\nx = torch.ones(3).cuda()\n\n"
        "@app.get('/x')\ndef look():\n    return {'device': str(x.device)}\n"
    )
    server = make_server("spawns:app", "--preload").wait_ready()
    assert server.json("/x") == {"device": "cuda:0"}
