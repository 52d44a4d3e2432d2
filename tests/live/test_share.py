"""gpuworker.share on the CPU: one load and one copy per device, and nothing that leaks or is shared too much."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.live.server import Load, Server, is_running, marked_processes, wait_until

Make = Callable[..., Server]
ONE_DEVICE = {"devices": "cpu"}
#: One after the other: these look at the shared memory of the whole machine, or take much of it.
one_after_the_other = pytest.mark.xdist_group("shared memory")
#: The same on every machine, so that sums are added up in the same order.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Descriptors of one object in the store of a device: its index and its arena.
FDS_OF_AN_OBJECT = 2


def ask_each(server: Server, workers: int, path: str = "/answer") -> dict[int, dict[str, Any]]:
    """The answers of all workers by pid, once exactly `workers` live."""
    return wait_until_each(server, workers, path, lambda answer: True)


def wait_until_each(
    server: Server, workers: int, path: str, condition: Callable[[dict[str, Any]], bool]
) -> dict[int, dict[str, Any]]:
    """The same, once all answers fulfil `condition`."""

    def all_of_them() -> dict[int, dict[str, Any]] | None:
        assert server.process.poll() is None, "the server ended"
        if len(server.worker_pids()) != workers:
            return None
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(ask, server, f"{path}?hold=0.1") for _ in range(workers)]
            answers = {answer["pid"]: answer for future in futures if (answer := future.result())}
        complete = len(answers) == workers and set(answers) == server.worker_pids()
        return answers if complete and all(map(condition, answers.values())) else None

    try:
        return wait_until(all_of_them, f"{path} of {workers} workers")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.log}") from None


def ask(server: Server, path: str) -> Any:
    """The answer; None if the worker died over it."""
    try:
        return server.json(path)
    except (OSError, http.client.HTTPException):
        return None


def loads(tmp_path: Path) -> list[tuple[str, int]]:
    """What the loaders noted: device or object, and pid."""
    with contextlib.suppress(FileNotFoundError):
        lines = (tmp_path / "loads").read_text().splitlines()
        return [(what, int(pid)) for what, pid in map(str.split, lines)]
    return []


def kill(pid: int) -> None:
    """kill -9, until the arbiter has noticed."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"the arbiter to reap {pid}")


def run_python(code: str, tmp_path: Path) -> str:
    """What `code` prints in a process that is no worker."""
    server = Server(tmp_path)  # for its environment; not started
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=server.env | ONE_THREAD, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# What the kernel holds.


def count_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def parked_fds(server: Server) -> int:
    """Descriptors in the queues of the arbiter's sockets."""
    return sum(
        int(count)
        for info in Path(f"/proc/{server.pid}/fdinfo").iterdir()
        for count in re.findall(r"^scm_fds:\s*(\d+)", info.read_text(), re.M)
    )


def memfds(server: Server) -> set[int]:
    """The inodes of the memfds with weights that any process of the server has mapped or open."""
    inodes = set()
    for pid in marked_processes(str(server.tmp_path)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "memfd:gpuworker-weights" in line}
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if "memfd:gpuworker-weights" in os.readlink(fd):
                    inodes.add(fd.stat().st_ino)
    return inodes


def shmem() -> int:
    """MiB of the whole machine that are memfds, shared memory and the like."""
    kib = re.search(r"^Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert kib
    return int(kib[1]) // 1024


def private_memory(pid: int) -> int:
    """MiB of one process that neither lie in a file nor are shared."""
    kib = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(kib[1]) // 1024 if kib else 0


def pss(server: Server) -> float:
    """MiB of arbiter and workers, each page counted once."""
    kib = 0
    for pid in (server.pid, *server.worker_pids()):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        assert found
        kib += int(found[1])
    return kib / 1024


# One load.


def test_the_loader_runs_once_per_device(make_server: Make, tmp_path: Path) -> None:
    server = make_server("shares:app", workers=4)
    pids = set(ask_each(server, 4))
    for pid in pids:
        kill(pid)
        ask_each(server, 4)
    assert not pids & server.worker_pids()
    assert sorted(device for device, _ in loads(tmp_path)) == ["0", "1"]


def test_workers_that_recycle_do_not_load(make_server: Make, tmp_path: Path) -> None:
    server = make_server("shares:app", "--max-requests", "5")
    ask_each(server, 2)
    with Load(server, path="/answer") as load:
        server.wait_for_log("Autorestarting worker", 6)
    server.wait_for_log(r"Slot \d+ on .* ready", 6)
    assert load.failures == []
    assert sorted(device for device, _ in loads(tmp_path)) == ["0", "1"]


def test_the_loaders_of_two_devices_run_at_the_same_time(make_server: Make, tmp_path: Path) -> None:
    server = make_server("shares:app", workers=4, env={"MEET": "1"})
    ask_each(server, 4)
    assert sorted(device for device, _ in loads(tmp_path)) == ["0", "1"]


@pytest.mark.parametrize("args", [(), ("--preload",)], ids=["import", "preload"])
def test_all_workers_answer_bit_for_bit_what_a_fresh_load_does(
    make_server: Make, tmp_path: Path, args: tuple[str, ...]
) -> None:
    expected = run_python("import shares; print(shares.digest())", tmp_path)
    server = make_server("shares:app", *args, workers=4, env=ONE_THREAD)
    answers = ask_each(server, 4).values()
    assert {answer["digest"] for answer in answers} == {expected}
    assert {answer["requires_grad"] for answer in answers} == {False}


# A loader that fails.


def test_a_loader_that_is_killed_hands_over(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    server = make_server("shares:app", workers=3, **ONE_DEVICE)
    wait_until(lambda: loads(tmp_path), "the first load")
    ((_, first),) = loads(tmp_path)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(loads(tmp_path)) == 2, "the load of the next worker")
    (tmp_path / "hang").unlink()
    assert first not in ask_each(server, 3)
    assert len(loads(tmp_path)) == 2


def test_a_loader_that_raises_stops_a_server_that_was_never_ready(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    server = make_server("shares:app", workers=4)
    assert server.wait() == 3
    assert server.log.count("Traceback") == 1
    assert "the weights are not there" in server.log


def test_a_loader_that_hangs_stops_a_server_that_was_never_ready(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    server = make_server("shares:app", workers=3, env={"GPUWORKER_LOAD_TIMEOUT": "5"}, **ONE_DEVICE)
    assert server.wait() != 0
    assert server.log.count("still loading after GPUWORKER_LOAD_TIMEOUT=5 s") == 1


@pytest.mark.parametrize("flag", ["fail-once", "hang-once"])
def test_a_loader_that_fails_in_a_reload_hands_over(make_server: Make, tmp_path: Path, flag: str) -> None:
    # The next one needs time of its own: what it waited for the first must not count.
    env = {"GPUWORKER_LOAD_TIMEOUT": "8", "LOAD_SECONDS": "2"}
    server = make_server("shares:app", workers=2, env=env, **ONE_DEVICE)
    ask_each(server, 2)
    (tmp_path / "seed").write_text("5")
    (tmp_path / flag).touch()
    with Load(server, path="/answer") as load:
        server.signal(signal.SIGHUP)
        server.wait_for_log(r"Slot \d cannot start, the old worker serves on")
        wait_until_each(server, 2, "/answer", lambda answer: answer["seed"] == 5)
    assert load.failures == []


# Models of the field.


def test_models_of_the_field_answer_what_they_do_in_a_plain_process(make_server: Make, tmp_path: Path) -> None:
    expected = json.loads(run_python("import field, json; print(json.dumps(field.digests()))", tmp_path))
    (tmp_path / "loads").unlink()
    server = make_server("field:app", workers=2, env=ONE_THREAD, **ONE_DEVICE)
    for pid, answer in ask_each(server, 2, "/digests").items():
        assert answer == expected | {"pid": pid}
    assert sorted(name for name, _ in loads(tmp_path)) == sorted(expected)


def write_safetensors(tmp_path: Path, limit: int, megabytes: int = 1) -> Path:
    """The weights of ``filed``."""
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.linspace(-limit, limit, megabytes * 2**18).view(-1, 1024)}, path)
    return path


def test_a_safetensors_file_is_kept_until_it_changes(make_server: Make, tmp_path: Path) -> None:
    def digests() -> set[str]:
        return {answer["digest"] for answer in ask_each(server, 2, "/digest").values()}

    write_safetensors(tmp_path, 1)
    server = make_server("filed:app", workers=2, env=ONE_THREAD, **ONE_DEVICE)
    first = digests()
    server.reload()
    assert digests() == first
    assert len(loads(tmp_path)) == 1
    path = write_safetensors(tmp_path, 2)
    server.reload()
    second = digests()
    assert len(loads(tmp_path)) == 2
    assert second == {run_python("import filed; print(filed.digest())", tmp_path)} != first
    workers = server.worker_pids()
    os.truncate(path, 0)  # a bus error for whoever has it mapped
    assert digests() == second
    assert server.worker_pids() == workers


@one_after_the_other
def test_a_safetensors_file_is_copied_once(make_server: Make, tmp_path: Path) -> None:
    megabytes = 512
    path = write_safetensors(tmp_path, 1, megabytes)
    server = make_server("filed:app", workers=2, **ONE_DEVICE)
    peaks: dict[int, int] = {}

    def ready() -> bool:
        assert server.process.poll() is None, server.log
        for pid in server.worker_pids():
            with contextlib.suppress(OSError):  # the arbiter has another child for a moment when it starts
                peaks[pid] = max(peaks.get(pid, 0), private_memory(pid))
        return len(re.findall(r"Slot \d+ on .* ready", server.log)) == 2

    wait_until(ready, "the workers")
    path.unlink()
    ((_, loader),) = loads(tmp_path)
    (other,) = server.worker_pids() - {loader}
    # From the file, which is mapped, to the shared memory, and nowhere else.
    assert peaks[loader] - private_memory(other) < megabytes / 4, peaks


# Objects and names.


def test_several_objects_of_several_kinds(make_server: Make, tmp_path: Path) -> None:
    server = make_server("objects:app", workers=4, env=ONE_THREAD)
    for answer in ask_each(server, 4, "/objects").values():
        del answer["pid"]
        assert answer == dict.fromkeys(["module", "state_dict", "pair", "tensor"], True)
    # Two devices have loaded each of them, and put it into the store.
    kinds = sorted(kind for kind, _ in loads(tmp_path))
    assert kinds == sorted(["module", "state_dict", "pair", "tensor"] * 2)
    assert parked_fds(server) == 2 * 4 * FDS_OF_AN_OBJECT


def test_the_object_is_real(make_server: Make, tmp_path: Path) -> None:
    env = ONE_THREAD | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    server = make_server("objects:app", workers=2, env=env, **ONE_DEVICE)
    for answer in ask_each(server, 2, "/real").values():
        wrong = [what for what, right in answer.items() if what != "pid" and not right]
        assert wrong == []
        assert len(answer) == 10
    for answer in ask_each(server, 2, "/objects").values():
        assert answer["module"], "as it was before all that"


@pytest.mark.parametrize("loader", ["lambda: torch.ones(1)", "functools.partial(torch.ones, 1)"])
def test_a_loader_without_a_name(make_server: Make, tmp_path: Path, loader: str) -> None:
    (tmp_path / "nameless.py").write_text(
        f"import functools, torch, gpuworker\nfrom where import app\ngpuworker.share({loader})\n"
    )
    server = make_server("nameless:app")
    assert server.wait() == 3
    assert re.search(r"ShareError: .*give it name=", server.log)
    assert server.log.count("Traceback") == 1


def test_two_loaders_of_one_name(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "import torch, gpuworker\nfrom where import app\n"
        "one = gpuworker.share(lambda: torch.ones(1), name='both')\n"
        "two = gpuworker.share(lambda: torch.zeros(1), name='both')\n"
    )
    server = make_server("twice:app")
    assert server.wait() == 3
    assert re.search(r"ShareError: two different loaders share the name 'both'", server.log)
    assert server.log.count("Traceback") == 1


def test_one_loader_shared_twice_is_one_object(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(
        "import gpuworker\nfrom shares import app, load, net\n"
        "@app.get('/same')\n"
        "def same():\n"
        "    return {'same': gpuworker.share(load) is net}\n"
    )
    server = make_server("again:app", workers=1, **ONE_DEVICE)
    assert server.json("/same") == {"same": True}
    assert len(loads(tmp_path)) == 1


# --preload


def test_preload_binds_the_proxy_before_the_first_request(make_server: Make, tmp_path: Path) -> None:
    server = make_server("shares:app", "--preload", workers=4)
    first = server.json("/answer")
    answers = [first, *ask_each(server, 4).values()]
    assert {(answer["proxy"], answer["instance"]) for answer in answers} == {(True, True)}
    assert {answer["seed"] for answer in answers} == {0}
    assert sorted(device for device, _ in loads(tmp_path)) == ["0", "1"]
    for pid in ask_each(server, 4):
        kill(pid)
    ask_each(server, 4)
    assert len(loads(tmp_path)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "print(net.body)",
        "net(torch.ones(1, 64))",
        "net.body = None",
        "copy.deepcopy(net)",
        "torch.compile(net)",
        "net.register_forward_hook(print)",
        "if net: pass",
        "isinstance(net, torch.nn.Module)",
        "print(net)",
    ],
)
def test_what_a_preloaded_app_shares_cannot_be_used_while_it_is_imported(
    make_server: Make, tmp_path: Path, line: str
) -> None:
    (tmp_path / "early.py").write_text(f"import copy, torch\nfrom shares import app, net\n\n{line}\n")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    server = make_server("early:app", "--preload", workers=4, env=env)
    assert server.wait() != 0
    assert f'File "{tmp_path}/early.py", line 4' in server.log
    assert line in server.log
    assert "without --preload" in server.log
    assert server.log.count("Traceback") <= 1
    assert loads(tmp_path) == []


# Outside gunicorn.


def test_outside_gunicorn_it_is_the_loader_that_is_called(tmp_path: Path) -> None:
    code = "import shares; print(type(shares.net) is shares.Net, shares.answer()['seed'])"
    (tmp_path / "seed").write_text("3")
    assert run_python(code, tmp_path) == "True 3.0"
    assert len(loads(tmp_path)) == 1


def test_the_lock_outside_gunicorn(tmp_path: Path) -> None:
    code = """
import counter, gpuworker
with gpuworker.lock(counter.counts):
    print("held")
print(counter.look()['counter'])
lock = gpuworker.lock(counter.counts)
lock.acquire()
import threading
found = []
thread = threading.Thread(target=lambda: found.append(gpuworker.lock(counter.counts).acquire(timeout=0.1)))
thread.start(); thread.join()
print(found)
lock.release()
try:
    gpuworker.lock(counter.counts["counter"])
except Exception as error:
    print(type(error).__name__)
"""
    assert run_python(code, tmp_path).split() == ["held", "0", "[False]", "ShareError"]


# What a worker writes.


def test_a_write_stays_in_the_worker_that_makes_it(make_server: Make, tmp_path: Path) -> None:
    server = make_server("shares:app", workers=2, **ONE_DEVICE)
    ((original,),) = [{answer["digest"] for answer in ask_each(server, 2).values()}]
    writer = server.json("/add")["pid"]
    answers = ask_each(server, 2)
    assert answers.pop(writer)["digest"] != original, "the write had an effect"
    ((other, answer),) = answers.items()
    assert answer["digest"] == original
    kill(writer)
    after = ask_each(server, 2)
    assert other in after
    assert {answer["digest"] for answer in after.values()} == {original}
    assert len(loads(tmp_path)) == 1


def test_buffers_and_private_tensors_are_of_each_worker(make_server: Make) -> None:
    server = make_server("norms:app", workers=2, **ONE_DEVICE)
    before = ask_each(server, 2, "/buffers")
    trained = server.json("/train")
    pid = trained["pid"]
    assert (trained["batches"], trained["cache"], trained["bias"]) == (1, 600_000, 123)
    assert min(trained["mean"]) > 0.5
    after = ask_each(server, 2, "/buffers")
    assert after.pop(pid) == trained
    ((other, state),) = after.items()
    assert state == before[other]
    assert server.log.count("is in training mode") == 1


def test_a_private_pattern_that_matches_nothing(make_server: Make) -> None:
    server = make_server("norms:app", workers=2, env={"PRIVATE": "tail.*"})
    assert server.wait() == 3
    assert re.search(r"PackingError: private='tail\.\*' matches no tensor; there are .*'head\.weight'", server.log)
    assert server.log.count("Traceback") == 1


# mutable=True


@pytest.mark.parametrize(
    ("worker", "args"),
    [("gpuworker.CudaWorker", ()), ("gpuworker.CudaThreadWorker", ("--threads", "4"))],
    ids=["sync", "threads"],
)
def test_no_count_under_the_lock_is_lost(make_server: Make, worker: str, args: tuple[str, ...]) -> None:
    requests, times = 100, 100
    server = make_server("counter:app", *args, worker=worker, workers=8, env=ONE_THREAD, **ONE_DEVICE)
    server.wait_ready(8)
    numbers, seen, confirmed, lost = itertools.count(), [], [], []

    def count() -> None:
        while (number := next(numbers)) < requests:
            if number % 10 == 9:
                # It dies with the lock in its hands. No other thread of it can be within a count then.
                with pytest.raises((OSError, http.client.HTTPException)):
                    server.get("/die")
            answer = ask(server, f"/count?times={times}")
            if answer is None:
                lost.append(number)
            else:
                confirmed.append(answer)
            seen.append(server.json("/look") if not args else ask(server, "/look"))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(count) for _ in range(8)]:
            future.result()
    answers = wait_until_each(server, 8, "/look", lambda answer: True) if not args else {0: server.json("/look")}
    assert [answer["wrong"] for answer in confirmed if answer["wrong"]] == []
    assert all(look["counter"] == look["record"] for look in seen if look)
    total = next(iter(answers.values()))["counter"]
    assert {(answer["counter"], answer["record"]) for answer in answers.values()} == {(total, total)}
    assert total >= max(look["counter"] for look in seen if look)
    assert len(re.findall(r"was sent SIGKILL", server.log)) >= requests // 10
    if args:
        # A request that shared its process with /die may have counted some of its counts.
        assert len(confirmed) * times <= total <= requests * times
    else:
        assert lost == []
        assert total == requests * times


def test_mutable_tensors_outlive_all_workers(make_server: Make) -> None:
    server = make_server("counter:app", workers=2, **ONE_DEVICE)
    server.wait_for_workers(2)
    server.json("/count?times=7")
    for pid in server.worker_pids():
        os.kill(pid, signal.SIGKILL)
    server.wait_for_log(r"Slot \d+ on .* ready", 4)
    assert server.json("/look")["counter"] == 7


# Reload.


@pytest.mark.parametrize("kept_by", ["nothing", "files", "version"])
def test_what_a_reload_keeps(make_server: Make, tmp_path: Path, kept_by: str) -> None:
    seed = tmp_path / "seed"
    seed.write_text("1")
    server = make_server("shares:app", env={"KEPT_BY": kept_by}, **ONE_DEVICE)
    ask_each(server, 2)
    expected = 1
    for _ in range(3):
        server.reload()
        ask_each(server, 2)
        expected += kept_by == "nothing"
        assert len(loads(tmp_path)) == expected
    # The generation that loaded is gone long since, but its weights are not.
    for pid in server.worker_pids():
        kill(pid)
    ask_each(server, 2)
    assert len(loads(tmp_path)) == expected
    seed.write_text("2")
    server.reload()
    wait_until_each(server, 2, "/answer", lambda answer: answer["seed"] == 2)
    assert len(loads(tmp_path)) == expected + 1
    assert parked_fds(server) == FDS_OF_AN_OBJECT


def test_a_touched_or_replaced_file_is_loaded_anew(make_server: Make, tmp_path: Path) -> None:
    seed, new = tmp_path / "seed", tmp_path / "new"
    seed.write_text("1")
    server = make_server("shares:app", env={"KEPT_BY": "files"}, workers=1, **ONE_DEVICE)
    ask_each(server, 1)
    status = seed.stat()
    os.utime(seed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    server.reload()
    ask_each(server, 1)
    assert len(loads(tmp_path)) == 2
    status = seed.stat()
    new.write_text("2")
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(seed)
    server.reload()
    assert next(iter(ask_each(server, 1).values()))["seed"] == 2
    assert len(loads(tmp_path)) == 3


KEPT = """
import os, torch, where, gpuworker
from net import Net
app = where.app

@gpuworker.share(version=1)
def pair():
    with open(os.path.join(os.environ["HOME"], "loads"), "a") as loads:
        loads.write(f"cpu {os.getpid()}\\n")
    return {"net": Net(2, 2).eval()}
"""


def test_changed_classes_are_loaded_anew(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(KEPT)
    (tmp_path / "net.py").write_text("import torch\n\nclass Net(torch.nn.Linear): pass\n")
    server = make_server("kept:app", **ONE_DEVICE)
    ask_each(server, 2, "/where")
    for text, expected in (("", 1), ("\n# It answers otherwise now.\n", 2)):
        with (tmp_path / "net.py").open("a") as source:
            source.write(text)
        server.reload()
        ask_each(server, 2, "/where")
        assert len(loads(tmp_path)) == expected


def test_a_file_that_changes_waits_for_the_next_generation(make_server: Make, tmp_path: Path) -> None:
    # A worker that comes back must not have other weights than its siblings.
    seed = tmp_path / "seed"
    seed.write_text("1")
    server = make_server("shares:app", env={"KEPT_BY": "files"}, **ONE_DEVICE)
    first, second = ask_each(server, 2)
    seed.write_text("2")
    kill(first)
    answers = ask_each(server, 2)
    assert second in answers
    assert [answer["seed"] for answer in answers.values()] == [1, 1]
    assert len(loads(tmp_path)) == 1
    server.reload()
    assert [answer["seed"] for answer in ask_each(server, 2).values()] == [2, 2]
    assert len(loads(tmp_path)) == 2


@pytest.mark.parametrize(("kept_by", "count"), [("nothing", 2), ("files", 1)])
def test_under_reload_only_what_has_a_stamp_is_kept(
    make_server: Make, tmp_path: Path, kept_by: str, count: int
) -> None:
    # In development a worker may run newer code than the one that has loaded.
    (tmp_path / "seed").write_text("1")
    server = make_server("shares:app", "--reload", env={"KEPT_BY": kept_by}, **ONE_DEVICE)
    pid, _ = ask_each(server, 2)
    assert len(loads(tmp_path)) == count
    kill(pid)
    ask_each(server, 2)
    assert len(loads(tmp_path)) == (3 if kept_by == "nothing" else 1)


@one_after_the_other
def test_reloads_leave_one_copy(make_server: Make, tmp_path: Path) -> None:
    before = shmem()
    server = make_server("shares:app", env={"MEGABYTES": "64"}, **ONE_DEVICE)
    ask_each(server, 2)
    at_first = memfds(server)
    arbiter_fds = count_fds(server.pid)
    for number in range(10):
        (tmp_path / "seed").write_text(str(number))
        server.reload()
        wait_until_each(server, 2, "/answer", lambda answer, number=number: answer["seed"] == number)
    wait_until(lambda: parked_fds(server) == FDS_OF_AN_OBJECT, "one copy in the store", 30)
    wait_until(lambda: len(memfds(server)) == len(at_first), "one copy in the workers", 30)
    assert not memfds(server) & at_first
    wait_until(lambda: shmem() < before + 3 * 64, "the memory of the old generations", 60)
    wait_until(lambda: count_fds(server.pid) == arbiter_fds, "the arbiter to have the descriptors it had", 30)


def test_what_no_generation_uses_any_more_goes(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "name").write_text("one")
    server = make_server("shares:app", **ONE_DEVICE)
    ask_each(server, 2)
    # The next generation calls its object otherwise, so no load takes the place of the old one.
    (tmp_path / "name").write_text("other")
    server.reload()
    ask_each(server, 2)
    assert len(loads(tmp_path)) == 2
    wait_until(lambda: parked_fds(server) == FDS_OF_AN_OBJECT, "an idle worker to drop the old object", 30)


# What it costs.


def test_the_number_of_parameters_costs_no_descriptors(tmp_path: Path) -> None:
    found = []
    for parameters in (2, 2000):
        home = tmp_path / str(parameters)
        home.mkdir()
        with Server(home, "shares:app", workers=2, devices="cpu", env={"PARAMETERS": str(parameters)}) as server:
            # Two: the one that has loaded, and one that has not.
            found.append(sorted(min(looks(count_fds, pid)) for pid in ask_each(server, 2, "/read")))
    few, many = found
    assert few == many


def looks(look: Callable[[int], int], pid: int) -> list[int]:
    """What many looks find: the connection of the last request may be open a moment longer."""
    seen: list[int] = []
    return wait_until(lambda: seen.append(look(pid)) or (seen if len(seen) > 25 else []), "looks")


@one_after_the_other
def test_more_workers_cost_interpreters_not_weights(make_server: Make) -> None:
    megabytes = 300
    server = make_server("shares:app", workers=3, env={"MEGABYTES": str(megabytes)} | ONE_THREAD, **ONE_DEVICE)
    ask_each(server, 3, "/read")
    three = pss(server)
    for workers in (4, 5, 6):
        server.signal(signal.SIGTTIN)
        ask_each(server, workers, "/read")
    six = pss(server)
    assert six - three < 3 * 120, (three, six)
    # The one that has loaded let go of what it had loaded.
    assert three < megabytes + 4 * 160, (three, six)
    with Load(server, path="/read") as load:
        wait_until(lambda: load.good > 100, "requests")
    assert pss(server) - six < 60


# Crashes.


STEPS = [
    "before pack",
    "after pack",
    "before create",
    "after create",
    "before copy",
    "after copy",
    "before finish",
    "after finish",
    "before update",
    "after update",
    "before publish",
    "before _keep_newest",
    "before _send",
    "after _send",
    "after _keep_newest",
    "after publish",
    "before attach",
    "after attach",
    "before unpack",
    "after unpack",
]


def test_a_worker_may_be_killed_at_every_step(make_server: Make, tmp_path: Path) -> None:
    server = make_server("crashing:app", "--preload", workers=3, **ONE_DEVICE)
    ask_each(server, 3)
    arbiter_fds, copies = count_fds(server.pid), len(memfds(server))
    for number, step in enumerate(STEPS, 1):
        (tmp_path / "seed").write_text(str(number))
        (tmp_path / "crash").write_text(step)
        server.signal(signal.SIGHUP)
        wait_until_each(server, 3, "/answer", lambda answer, number=number: answer["seed"] == number)
        assert not (tmp_path / "crash").exists(), step
        assert parked_fds(server) == FDS_OF_AN_OBJECT, step
    assert count_fds(server.pid) == arbiter_fds
    wait_until(lambda: len(memfds(server)) == copies, "one copy", 30)


@one_after_the_other
def test_kills_at_random_points(make_server: Make, tmp_path: Path) -> None:
    before = shmem()
    env = {"MEGABYTES": "20", "LOAD_SECONDS": "0.05"}
    # Preloaded, so that a new worker loads and attaches within the moment after which it may be killed.
    server = make_server("shares:app", "--preload", workers=3, env=env, **ONE_DEVICE)
    ask_each(server, 3)
    arbiter_fds, copies = count_fds(server.pid), len(memfds(server))
    chance, seed = random.Random(3), 0
    for number in range(60):
        if chance.random() < 0.6:
            seed = number + 1
            (tmp_path / "seed").write_text(str(seed))
            server.signal(signal.SIGHUP)
        else:
            os.kill(chance.choice(sorted(server.worker_pids())), signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.1))  # the random point
        if pids := sorted(server.worker_pids()):
            os.kill(chance.choice(pids), signal.SIGKILL)
        wait_until_each(server, 3, "/answer", lambda answer, seed=seed: answer["seed"] == seed)
    wait_until(lambda: parked_fds(server) == FDS_OF_AN_OBJECT, "one copy in the store", 30)
    wait_until(lambda: len(memfds(server)) == copies, "one copy in the workers", 30)
    wait_until(lambda: count_fds(server.pid) == arbiter_fds, "the arbiter to have the descriptors it had", 30)
    wait_until(lambda: shmem() < before + 10 * 20, "the memory of the old generations", 60)


@one_after_the_other
def test_kills_of_the_loading_worker(make_server: Make, tmp_path: Path) -> None:
    env = {"MEGABYTES": "20", "LOAD_SECONDS": "0.05"}
    server = make_server("shares:app", "--preload", workers=3, env=env, **ONE_DEVICE)
    ask_each(server, 3)
    arbiter_fds, copies = count_fds(server.pid), len(memfds(server))
    for number in range(1, 21):
        count = len(loads(tmp_path))
        (tmp_path / "seed").write_text(str(number))
        server.signal(signal.SIGHUP)
        wait_until(lambda count=count: len(loads(tmp_path)) > count, "the load")
        with contextlib.suppress(ProcessLookupError):
            os.kill(loads(tmp_path)[count][1], signal.SIGKILL)
        wait_until_each(server, 3, "/answer", lambda answer, number=number: answer["seed"] == number)
    assert len(loads(tmp_path)) > 25, "it was hit while it loaded"
    wait_until(lambda: parked_fds(server) == FDS_OF_AN_OBJECT, "one copy in the store", 30)
    wait_until(lambda: len(memfds(server)) == copies, "one copy in the workers", 30)
    wait_until(lambda: count_fds(server.pid) == arbiter_fds, "the arbiter to have the descriptors it had", 30)


@one_after_the_other
def test_nothing_is_left_of_a_killed_arbiter(make_server: Make) -> None:
    before = shmem()
    server = make_server("shares:app", env={"MEGABYTES": "300"}, **ONE_DEVICE)
    workers = ask_each(server, 2)
    assert shmem() > before + 250
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(is_running, workers)), "the workers to leave", 20)
    wait_until(lambda: shmem() < before + 150, "the memory to be free", 60)
