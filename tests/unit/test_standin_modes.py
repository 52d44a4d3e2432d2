"""The redirection under inference_mode(), in copies, and in threads that are older than it."""

from __future__ import annotations

import subprocess
import sys

from tests.live.server import REPOSITORY

START = "import copy, threading, torch\nfrom gpuworker.standin import redirect\nredirect.install(refuse=None)\n"


def run_python(code: str) -> str:
    """What `code` prints in a process of its own, since the redirection is one for each."""
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_inference_mode_hides_nothing() -> None:
    code = """
there = torch.zeros(3).cuda()
with torch.inference_mode():
    x = torch.ones(3)
    moved = [x.cuda(), x.to("cuda", torch.float16), x.to(there), torch.as_tensor([1.0], device="cuda")]
    made = [torch.ones_like(moved[0]), torch.nn.Linear(3, 3).cuda()(moved[0]), there.half()]
    print({str(tensor.device) for tensor in moved + made}, x.device)
"""
    assert run_python(code) == "{'cuda:0'} cpu"


def test_copies_stay_where_the_original_is() -> None:
    code = """
model = torch.nn.Linear(3, 3).cuda()
copies = [copy.deepcopy(model).weight, torch.zeros(3).type_as(model.weight), copy.deepcopy(torch.ones(1))]
print(*(copy.device for copy in copies))
"""
    assert run_python(code) == "cuda:0 cuda:0 cpu"


def test_a_thread_that_ran_before_the_first_use() -> None:
    code = """
go = threading.Event()
def work():
    go.wait()
    x = torch.full((3,), 2.0, device="cuda")
    print(x.device, (x * 2).device)
thread = threading.Thread(target=work)
thread.start()
there = torch.zeros(3).cuda()
go.set()
thread.join()
"""
    assert run_python(code) == "cuda:0 cuda:0"


def test_threads_that_end_just_before_the_process() -> None:
    # Each time the interpreter may end while the thread, joined already, still cleans up.
    code = """
there = torch.zeros(3).cuda()
threads = [threading.Thread(target=there.sum) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    for _ in range(3):
        run_python(code)
