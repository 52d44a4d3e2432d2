"""The redirection under inference_mode(), in copies, in threads that are older than it, and at the end of a process."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import torch

from gpuworker.standin import redirect
from tests.unit.test_standin import in_a_child, is_on_cuda


@in_a_child
def test_inference_mode_hides_nothing() -> None:
    redirect.install(refuse=None)
    there = torch.zeros(3).cuda()
    with torch.inference_mode():
        x = torch.ones(3)
        moved = [x.cuda(), x.to("cuda", torch.float16), x.to(there), torch.as_tensor([1.0], device="cuda")]
        made = [torch.ones_like(moved[0]), torch.nn.Linear(3, 3).cuda()(moved[0]), there.half()]
        assert all(map(is_on_cuda, moved + made))
        assert not is_on_cuda(x)


@in_a_child
def test_a_copy_is_where_the_original_is() -> None:
    redirect.install(refuse=None)
    model, x = torch.nn.Linear(3, 3).cuda(), torch.ones(3)
    assert is_on_cuda(copy.deepcopy(model).weight)
    assert is_on_cuda(x.type_as(model.weight))
    assert not is_on_cuda(copy.deepcopy(x))


@in_a_child
def test_a_thread_that_ran_before_the_first_use() -> None:
    redirect.install(refuse=None)
    found: list[bool] = []
    go = threading.Event()

    def work() -> None:
        go.wait()
        x = torch.full((3,), 2.0, device="cuda")
        found.extend([is_on_cuda(x), is_on_cuda(x * 2)])

    thread = threading.Thread(target=work)
    thread.start()
    torch.zeros(3).cuda()
    go.set()
    thread.join()
    assert found == [True, True]


def test_threads_that_end_just_before_the_process() -> None:
    code = (
        "import threading, torch\nfrom gpuworker.standin import redirect\nredirect.install(refuse=None)\n"
        "x = torch.zeros(3).cuda()\n"
        "threads = [threading.Thread(target=x.sum) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    for _ in range(3):  # each time the interpreter may end while a thread, joined already, still cleans up
        subprocess.run([sys.executable, "-c", code], check=True)
