"""USR2: the new server attaches to what the old one has loaded, and neither depends on the other."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import GENEROUS, Server, children, is_running, wait_until
from tests.live.test_share import (
    FDS_OF_AN_OBJECT,
    ONE_DEVICE,
    ask,
    ask_each,
    count_fds,
    kill,
    loads,
    memfds,
    parked_fds,
    wait_until_each,
)

Make = Callable[..., Server]
Upgrade = Callable[[Server], Server]
BY_FILES = {"env": {"KEPT_BY": "files"}}


class Process:
    """A process that is no child of the test, to be used like a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if is_running(self.pid) else 0

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit: float = GENEROUS) -> int:
        wait_until(lambda: self.poll() is not None, f"the end of process {self.pid}", limit)
        return 0


class Upgraded(Server):
    """The server that USR2 made of another."""

    def __init__(self, old: Server, pid: int) -> None:
        self.__dict__.update(copy.copy(old.__dict__))
        self.process = Process(pid)  # type: ignore[assignment]


@pytest.fixture
def upgrade() -> Iterator[Upgrade]:
    """Sends USR2 and waits until the new server is ready; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def send(server: Server, workers: int = 2) -> Server:
            ready, before = server.log.count(" ready in "), set(children(server.pid))
            server.signal(signal.SIGUSR2)
            pid_path = server.tmp_path / "gunicorn.pid.2"
            new = wait_until(lambda: set(children(server.pid)) - before and pid_path.exists(), "the new arbiter")
            assert new
            upgraded = Upgraded(server, int(pid_path.read_text()))
            stack.callback(upgraded.stop)
            server.wait_for_log(" ready in ", ready + workers)
            return upgraded

        yield send


def leave(server: Server, number: signal.Signals = signal.SIGTERM) -> None:
    """End one of two servers, and wait until its workers are gone, too."""
    workers = set(children(server.pid)) - {int(pid) for pid in pid_files(server)}
    server.signal(number)
    server.wait()
    wait_until(lambda: not any(map(is_running, workers)), "its workers to leave")


def pid_files(server: Server) -> set[str]:
    return {path.read_text().strip() for path in server.tmp_path.glob("gunicorn.pid*")}


def test_the_new_server_attaches(make_server: Make, upgrade: Upgrade, tmp_path: Path, gunicorn: Path | None) -> None:
    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", gunicorn=gunicorn, **BY_FILES, **ONE_DEVICE)
    first = {answer["digest"] for answer in ask_each(old, 2).values()}
    copies, fds = memfds(old), count_fds(old.pid)
    new = upgrade(old)
    assert parked_fds(new) == FDS_OF_AN_OBJECT
    leave(old)
    assert {answer["digest"] for answer in ask_each(new, 2).values()} == first
    assert "The last server left on cpu: shares.load" in new.log
    assert len(loads(tmp_path)) == 1
    assert memfds(new) == copies
    assert parked_fds(new) == FDS_OF_AN_OBJECT
    wait_until(lambda: count_fds(new.pid) <= fds, "the new arbiter to have no more descriptors than the old one")
    # It is a server like any other: it reloads, and is upgraded in its turn.
    new.reload()
    ask_each(new, 2)
    new.wait_for_log("Master has been promoted")
    newest = upgrade(new)
    leave(new)
    ask_each(newest, 2)
    assert len(loads(tmp_path)) == 1
    (tmp_path / "seed").write_text("2")
    newest.reload()
    wait_until_each(newest, 2, "/answer", lambda answer: answer["seed"] == 2)
    assert len(loads(tmp_path)) == 2
    wait_until(lambda: parked_fds(newest) == FDS_OF_AN_OBJECT, "one copy in the store")
    wait_until(lambda: len(memfds(newest)) == len(copies) and not memfds(newest) & copies, "one copy", 30)


def test_changed_files_are_loaded_anew(make_server: Make, upgrade: Upgrade, tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    seed.write_text("1")
    old = make_server("shares:app", **BY_FILES, **ONE_DEVICE)
    ask_each(old, 2)
    copies = memfds(old)
    seed.write_text("2")
    new = upgrade(old)
    assert len(loads(tmp_path)) == 2
    leave(old)
    assert {answer["seed"] for answer in ask_each(new, 2).values()} == {2}
    wait_until(lambda: len(memfds(new)) == len(copies) and not memfds(new) & copies, "one copy", 30)
    assert parked_fds(new) == FDS_OF_AN_OBJECT


def test_what_the_new_code_does_not_share_goes(make_server: Make, upgrade: Upgrade, tmp_path: Path) -> None:
    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", **BY_FILES, **ONE_DEVICE)
    ask_each(old, 2)
    copies = memfds(old)
    (tmp_path / "name").write_text("other")
    new = upgrade(old)
    leave(old)
    ask_each(new, 2)
    assert len(loads(tmp_path)) == 2
    wait_until(lambda: parked_fds(new) == FDS_OF_AN_OBJECT, "a worker to drop what nobody uses", 30)
    wait_until(lambda: not memfds(new) & copies, "the old copy to go", 30)


SEVERAL = """
import os, torch, where, gpuworker
app = where.app

def load(name):
    print("loads", name, flush=True)  # any user may
    return torch.full((300_000,), 3.0)

def loader(name):
    return lambda: load(name)

first = gpuworker.share(loader("first"), name="first", version=1)
unversioned = gpuworker.share(loader("unversioned"), name="unversioned")
counter = gpuworker.share(loader("counter"), name="counter", version=1, mutable=True)
last = gpuworker.share(loader("last"), name="last", version=1)
counter += 1

@app.get("/sums")
def sums():
    return {"pid": os.getpid(), "sums": [t.sum().item() / 300_000 for t in (first, unversioned, last)]}
"""


@pytest.mark.parametrize("args", [(), ("--preload",)], ids=["import", "preload"])
def test_only_what_has_a_version_is_taken_over(
    make_server: Make, upgrade: Upgrade, tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "several.py").write_text(SEVERAL if not args else SEVERAL.replace("counter += 1\n", ""))
    old = make_server("several:app", *args, **ONE_DEVICE)
    ask_each(old, 2, "/sums")
    new = upgrade(old)
    # The state of the old server stays its own: the locks are, too.
    loaded = sorted(re.findall(r"^loads (\w+)", new.log, re.M))
    assert loaded == ["counter", "counter", "first", "last", "unversioned", "unversioned"]
    leave(old)
    assert {tuple(answer["sums"]) for answer in ask_each(new, 2, "/sums").values()} == {(3, 3, 3)}
    wait_until(lambda: parked_fds(new) == 4 * FDS_OF_AN_OBJECT, "each object once in the store", 30)


ON_CUDA = """
import torch, where
app = where.app
weights = torch.full((1_000_000,), 3.0).cuda()

@app.get("/sums")
def sums():
    import os
    return {"pid": os.getpid(), "sum": weights.sum().item()}
"""


def test_the_content_of_a_preloaded_app_is_not_taken_over(make_server: Make, upgrade: Upgrade, tmp_path: Path) -> None:
    app = tmp_path / "on_cuda.py"
    app.write_text(ON_CUDA)
    old = make_server("on_cuda:app", "--preload", **ONE_DEVICE)
    ask_each(old, 2, "/sums")
    copies = memfds(old)
    app.write_text(ON_CUDA.replace("3.0", "4.0"))
    new = upgrade(old)
    leave(old)
    assert {answer["sum"] for answer in ask_each(new, 2, "/sums").values()} == {4e6}
    assert not memfds(new) & copies


# Other devices, another user, another worker class.


@pytest.mark.parametrize(("before", "after", "expected"), [("cpu,cpu", "cpu", 2), ("cpu", "cpu,cpu", 2)])
def test_another_list_of_devices(
    make_server: Make, upgrade: Upgrade, tmp_path: Path, before: str, after: str, expected: int
) -> None:
    def config(devices: str) -> str:
        return f"raw_env = ['GPUWORKER_DEVICES={devices}']"

    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", config=config(before), devices=None, **BY_FILES)
    ask_each(old, 2)
    old.write_config(config(after))
    new = upgrade(old)
    leave(old)
    ask_each(new, 2)
    assert len(loads(tmp_path)) == expected
    devices = after.count("cpu")
    assert parked_fds(new) == devices * FDS_OF_AN_OBJECT
    wait_until(lambda: len(memfds(new)) == devices, "a copy for each device", 30)


def test_two_devices(make_server: Make, upgrade: Upgrade, tmp_path: Path) -> None:
    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", workers=3, **BY_FILES)
    ask_each(old, 3)
    copies = memfds(old)
    new = upgrade(old, 3)  # type: ignore[call-arg]
    leave(old)
    ask_each(new, 3)
    assert len(loads(tmp_path)) == 2
    assert memfds(new) == copies


@pytest.mark.skipif(os.getuid() != 0, reason="only root may change the user")
def test_another_user(make_server: Make, upgrade: Upgrade) -> None:
    with tempfile.TemporaryDirectory() as directory:  # that other users may read
        Path(directory).chmod(0o755)
        Path(directory, "several.py").write_text(SEVERAL.replace("counter += 1\n", ""))
        old = make_server("several:app", "--preload", "--pythonpath", directory, **ONE_DEVICE)
        ask_each(old, 2, "/sums")
        # Flask imports it in the first request, when the new user may not be allowed to read it.
        old.write_config("import encodings.idna\nuser = 65534")
        new = upgrade(old)
        leave(old)
        assert {tuple(answer["sums"]) for answer in ask_each(new, 2, "/sums").values()} == {(3, 3, 3)}
        assert new.log.count("loads first") == 1
        new.stop()


def test_a_new_server_without_this_package_holds_no_weights(
    make_server: Make, tmp_path: Path, gunicorn: Path | None
) -> None:
    (tmp_path / "seed").write_text("1")
    config = "worker_class = 'gpuworker.CudaWorker'"
    old = make_server("shares:app", worker=None, config=config, gunicorn=gunicorn, **BY_FILES, **ONE_DEVICE)
    ask_each(old, 2)
    old.write_config("worker_class = 'sync'")
    old.signal(signal.SIGUSR2)
    pid_path = tmp_path / "gunicorn.pid.2"
    wait_until(pid_path.exists, "the new arbiter")
    new = Upgraded(old, int(pid_path.read_text()))
    with contextlib.ExitStack() as stack:
        stack.callback(new.stop)
        wait_until(lambda: len(loads(tmp_path)) == 3, "plain workers that load for themselves")
        leave(old)
        assert {answer["seed"] for answer in ask_each(new, 2).values()} == {1}
        assert parked_fds(new) == 0


# Back-out and crashes.


def test_back_out(make_server: Make, upgrade: Upgrade, tmp_path: Path, gunicorn: Path | None) -> None:
    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", gunicorn=gunicorn, **BY_FILES, **ONE_DEVICE)
    workers = set(ask_each(old, 2))
    copies, fds = memfds(old), count_fds(old.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        (tmp_path / "seed").write_text(f"{number}")  # the new server has weights of its own
        new = upgrade(old)
        leave(new, number)
        (tmp_path / "gunicorn.pid.2").unlink(missing_ok=True)
        wait_until(lambda: memfds(old) == copies, "the memory of the new server to be free", 30)
        assert set(ask_each(old, 2)) == workers
    kill(workers.pop())
    answers = ask_each(old, 2)
    assert {answer["seed"] for answer in answers.values()} == {1}
    assert len(loads(tmp_path)) == 3
    wait_until(lambda: count_fds(old.pid) == fds, "the old arbiter to have the descriptors it had")


def test_the_old_server_is_killed(make_server: Make, upgrade: Upgrade, tmp_path: Path) -> None:
    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", **BY_FILES, **ONE_DEVICE)
    ask_each(old, 2)
    copies = memfds(old)
    new = upgrade(old)
    leave(old, signal.SIGKILL)
    for pid in ask_each(new, 2):
        kill(pid)
    ask_each(new, 2)
    assert len(loads(tmp_path)) == 1
    assert memfds(new) == copies
    assert parked_fds(new) == FDS_OF_AN_OBJECT


@pytest.mark.parametrize("victim", ["old", "new"])
def test_an_arbiter_is_killed_while_the_new_one_starts(
    make_server: Make, tmp_path: Path, victim: str, gunicorn: Path | None
) -> None:
    (tmp_path / "seed").write_text("1")
    old = make_server("shares:app", gunicorn=gunicorn, **BY_FILES, **ONE_DEVICE)
    workers = set(ask_each(old, 2))
    copies = memfds(old)
    before = set(children(old.pid))
    old.signal(signal.SIGUSR2)
    (pid,) = wait_until(lambda: set(children(old.pid)) - before, "the new arbiter")
    new = Upgraded(old, pid)
    if victim == "new":
        leave(new, signal.SIGKILL)
        assert set(ask_each(old, 2)) == workers
        assert memfds(old) == copies
        assert len(loads(tmp_path)) == 1
    else:
        with contextlib.ExitStack() as stack:
            stack.callback(new.stop)
            os.kill(old.pid, signal.SIGKILL)
            old.wait()
            wait_until(lambda: not any(map(is_running, workers)), "the old workers to leave")
            assert {answer["seed"] for answer in ask_each(new, 2).values()} == {1}
            assert len(loads(tmp_path)) <= 2
            wait_until(lambda: len(memfds(new)) == len(copies), "one copy")


# What others get of it.


SPAWNS = """
import json, os, subprocess, sys, torch, where, gpuworker
app = where.app
weights = gpuworker.share(lambda: torch.ones(300_000), name="weights", version=1)
CHILD = '''
import json, os, stat
sockets = [fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]
unix = [fd for fd in sockets if "SEQPACKET" in str(__import__("socket").socket(fileno=fd).type)]
print(json.dumps([unix, [name for name in os.environ if name.startswith("GPUWORKER_UP")]]))
'''

def child():
    run = subprocess.run([sys.executable, "-c", CHILD], close_fds=False, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)

AT_IMPORT = child()

@app.get("/child")
def what_a_child_has():
    return {"pid": os.getpid(), "found": [AT_IMPORT, child()]}
"""


@pytest.mark.parametrize("args", [(), ("--preload",)], ids=["import", "preload"])
def test_no_other_process_inherits_anything(
    make_server: Make, upgrade: Upgrade, tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    old = make_server("spawns:app", *args, **ONE_DEVICE)
    assert [a["found"] for a in ask_each(old, 2, "/child").values()] == [[[[], []], [[], []]]] * 2
    new = upgrade(old)
    assert ask(old, "/child")["found"] == [[[], []], [[], []]]
    leave(old)
    assert [a["found"] for a in ask_each(new, 2, "/child").values()] == [[[[], []], [[], []]]] * 2


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "{}", json.dumps({"pid": 1, "stores": [["cpu", 0, 1, 1]]}), json.dumps({"pid": "x"})]
)
def test_a_stale_variable_is_ignored(make_server: Make, text: str) -> None:
    server = make_server(env={"GPUWORKER_UPGRADE": text})
    server.wait_for_workers(2)
    server.wait_for_log("Cannot use what the last server left: GPUWORKER_UPGRADE")


def test_the_hooks_of_the_operator_run(make_server: Make, upgrade: Upgrade, tmp_path: Path) -> None:
    config = "def pre_exec(server): print('own pre_exec', flush=True)\ndef on_exit(server): print('own on_exit')\n"
    old = make_server("where:app", config=config)
    old.wait_for_workers(2)
    new: Any = upgrade(old)
    leave(new)
    leave(old)
    assert old.log.count("own pre_exec") == 1
    assert old.log.count("own on_exit") == 2
