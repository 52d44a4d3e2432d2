"""Apps that know nothing of this package, imported by the arbiter, on a real GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import processes_on, used_bytes
from tests.gpu.test_share import MIB, WORKER
from tests.live.server import Server, wait_until

Make = Callable[..., Server]

#: 1 GiB of weights at module level, and one tensor of every kind that has to be found and moved.
APP = """
import functools, gc, os
import flask, timm, torch, transformers

with open(os.path.join(os.environ["HOME"], "imports"), "a") as imports:
    imports.write(f"{os.getpid()}\\n")
torch.manual_seed(0)
torch.backends.cudnn.deterministic = True
torch.cuda.set_device(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False) for _ in range(4)]).to(device).eval()
bert = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2)).to("cuda").half().eval()
resnet = timm.create_model("resnet18").cuda().eval()
lstm = torch.nn.LSTM(64, 64, num_layers=2, bidirectional=True).cuda().eval()
script = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())).to("cuda:0").eval()
compiled = torch.compile(torch.nn.Linear(8, 8).cuda().eval(), backend="aot_eager")
table = torch.rand(1000, 1000).to("cuda:0")
view = table[3:5].t()
doubled = torch.stack([table[0], table[1]]) * 2
sparse = torch.eye(64).to_sparse().cuda()
cache = torch.zeros(2048, 1024, device="cuda")
left = torch.ones(3)
scale = functools.partial(torch.mul, torch.full((3,), 2.0).cuda())
NAME, MEMORY = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
gc.freeze()
app = flask.Flask(__name__)

@app.get("/infer")
def infer():
    with torch.inference_mode():
        image = torch.linspace(0, 1, 3 * 64 * 64, device="cuda").reshape(1, 3, 64, 64)
        outputs = {
            "layers": layers(torch.ones(2, 8192).cuda()),
            "bert": bert(torch.arange(64, device="cuda")[None])[0],
            "resnet": resnet(image),
            "lstm": lstm(torch.ones(3, 1, 64, device="cuda"))[0],
            "script": script(torch.ones(1, 8).cuda()),
            "compiled": compiled(torch.ones(1, 8).cuda()),
            "view": view * 1, "doubled": doubled * 1, "scale": scale(torch.ones(3, device="cuda")),
            "sparse": torch.sparse.mm(sparse, torch.ones(64, 2, device="cuda")),
        }
        cache.add_(1)
    tensors = [layers[0].weight, next(bert.parameters()), table, view, doubled, cache, sparse, script[0].weight]
    return {
        "outputs": {name: out.double().sum().item().hex() for name, out in outputs.items()},
        "devices": sorted({str(t.device) for t in tensors}), "left": str(left.device), "is_cuda": table.is_cuda,
        "view": view.data_ptr() == table.data_ptr() + 3 * 4000, "name": NAME, "memory": MEMORY,
        "flat": len({w.untyped_storage().data_ptr() for w in lstm._flat_weights}),
    } | ({"pid": os.getpid()} if "GPUWORKER_SLOT" in os.environ else {})
"""


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, object]:
    """What the app answers in a plain process."""
    (tmp_path / "unmodified.py").write_text(APP)
    code = "import json, unmodified; print(json.dumps(unmodified.infer()))"
    env = {**os.environ, "HOME": str(tmp_path)}
    output = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, check=True).stdout
    (tmp_path / "imports").unlink()
    answer: dict[str, object] = json.loads(output.splitlines()[-1])
    return answer


def answers(server: Server) -> dict[int, dict[str, object]]:
    found = (server.json("/infer") for _ in range(24))
    return {answer.pop("pid"): answer for answer in found}


def test_an_unmodified_app_works_and_shares(make_server: Make, tmp_path: Path, expected: dict[str, object]) -> None:
    before = used_bytes()
    server = make_server("unmodified:app", "--preload", workers=2, devices=None).wait_ready()
    assert server.pid not in processes_on()
    assert expected == wait_until(lambda: found if len(found := answers(server)) == 2 else None, "both").popitem()[1]
    assert all(answer == expected for answer in answers(server).values())
    used = used_bytes() - before
    print(f"2 workers: {used / MIB:.0f} MiB")
    assert used < 1200 * MIB + 2 * WORKER
    for round_ in range(1, 3):
        os.kill(max(server.worker_pids()), signal.SIGKILL)
        server.wait_ready(2 + round_)
    server.reload()
    assert all(answer == expected for answer in answers(server).values())
    assert server.log.count("Loaded the preloaded app") == 1
    assert len((tmp_path / "imports").read_text().split()) == 1
    print("\n".join(line for line in server.log.splitlines() if "ready in" in line or "Loaded" in line))


def test_the_same_app_without_preload(make_server: Make, expected: dict[str, object]) -> None:
    server = make_server("unmodified:app", workers=2, devices=None).wait_ready()
    assert all(answer == expected for answer in answers(server).values())


def test_the_driver_does_not_start_in_the_arbiter(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import torch\nfrom where import app\nfrom gpuworker import driver\nx = torch.zeros(3).cuda() * 2\n"
        "y = torch.tensor([1.0], device='cuda').half()\ntorch.cuda.synchronize()\nz = torch.empty(2).pin_memory()\n"
        "torch.cuda.empty_cache()\ntorch.cuda.manual_seed(3)\nx.cpu()\nassert torch.cuda.device_count() == 1\n"
        "assert not driver.is_initialised()\n"
    )
    make_server("asks:app", "--preload", devices=None).wait_ready()
