"""A restart of the service: the manager keeps the weights, and the new server attaches to them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live.manager import Manager
from tests.live.server import Server, is_running, marked_processes, wait_until
from tests.live.test_share import FDS_OF_AN_OBJECT, ask_each, kill, loads, memfds, parked_fds, wait_until_each
from tests.live.test_upgrade import Process

Make = Callable[..., Server]
ON = {"GPUWORKER_FDSTORE": "on", "KEPT_BY": "files"}


class Service:
    """A gunicorn under a manager."""

    def __init__(self, manager: Manager, server: Server) -> None:
        self.manager, self.server = manager, server

    def restart(self, *, kill_all: bool = False) -> None:
        """As ``systemctl restart``; or `kill_all` processes at once."""
        if kill_all:
            for pid in marked_processes(str(self.server.tmp_path)):
                os.kill(pid, signal.SIGKILL)
            self.server.wait()
        else:
            self.server.stop()
        wait_until(lambda: not list(marked_processes(str(self.server.tmp_path))), "the end of the service")
        self.manager.start(self.server)


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with contextlib.ExitStack() as stack:
        (tmp_path / "seed").write_text("1")

        def make(
            env: dict[str, str] = ON, sockets: dict[str, socket.socket] | None = None, **kwargs: object
        ) -> Service:
            manager = Manager(tmp_path, sockets)
            stack.callback(manager.close)
            server = Server(tmp_path, "shares:app", env=env | manager.env, **({"devices": "cpu"} | kwargs))  # type: ignore[arg-type]
            manager.start(server)
            stack.callback(server.stop)
            return Service(manager, server)

        yield make


def digests(service: Service, workers: int = 2) -> set[str]:
    return {answer["digest"] for answer in ask_each(service.server, workers).values()}


def test_a_restart_attaches(make_service: Callable[..., Service], tmp_path: Path, gunicorn: Path | None) -> None:
    service = make_service(gunicorn=gunicorn)
    first = digests(service)
    copies = memfds(service.server)
    assert service.manager.stored == ["gpuworker-0-cpu"]
    sent = len(service.manager.messages)
    for kill_all in (False, True, True):
        service.restart(kill_all=kill_all)
        assert digests(service) == first
        assert len(loads(tmp_path)) == 1
        assert memfds(service.server) == copies
        assert service.manager.stored == ["gpuworker-0-cpu"]
        assert service.manager.parked_fds() == parked_fds(service.server) == FDS_OF_AN_OBJECT
    # Each arbiter hands its store over once; what the workers do is not told.
    assert sum("FDSTORE" in message for message in service.manager.messages) == 2 * 4
    assert sum("FDSTORE" in message for message in service.manager.messages[:sent]) == 2
    (tmp_path / "seed").write_text("2")
    service.restart()
    wait_until_each(service.server, 2, "/answer", lambda answer: answer["seed"] == 2)
    assert len(loads(tmp_path)) == 2
    wait_until(lambda: service.manager.parked_fds() == FDS_OF_AN_OBJECT, "one copy with the manager")
    wait_until(lambda: len(memfds(service.server)) == 1 and not memfds(service.server) & copies, "one copy", 30)


def test_the_newest_weights_are_kept(make_service: Callable[..., Service], tmp_path: Path) -> None:
    service = make_service()
    ask_each(service.server, 2)
    (tmp_path / "seed").write_text("2")
    service.server.reload()
    wait_until_each(service.server, 2, "/answer", lambda answer: answer["seed"] == 2)
    service.restart(kill_all=True)
    assert {answer["seed"] for answer in ask_each(service.server, 2).values()} == {2}
    for pid in service.server.worker_pids():
        kill(pid)
    ask_each(service.server, 2)
    assert len(loads(tmp_path)) == 2


def test_what_does_not_last_is_given_back(make_service: Callable[..., Service], tmp_path: Path) -> None:
    service = make_service(env=ON | {"KEPT_BY": "nothing"})
    ask_each(service.server, 2)
    copies = memfds(service.server)
    service.restart()
    ask_each(service.server, 2)
    assert len(loads(tmp_path)) == 2
    assert service.manager.parked_fds() == FDS_OF_AN_OBJECT
    assert not memfds(service.server) & copies


def test_two_devices_and_then_one(make_service: Callable[..., Service], tmp_path: Path) -> None:
    service = make_service(devices="cpu,cpu")
    first = digests(service)
    assert service.manager.stored == ["gpuworker-0-cpu", "gpuworker-1-cpu"]
    service.restart()
    assert digests(service) == first
    service.server.env["GPUWORKER_DEVICES"] = "cpu"
    service.restart()
    assert digests(service) == first
    assert len(loads(tmp_path)) == 2
    assert service.manager.stored == ["gpuworker-0-cpu"]
    assert service.manager.parked_fds() == FDS_OF_AN_OBJECT


def test_beside_socket_activation(make_service: Callable[..., Service], tmp_path: Path, gunicorn: Path | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web, socket.create_server(("127.0.0.1", 0)) as admin:
        service = make_service(sockets={"web": web, "admin": admin}, bind=None, gunicorn=gunicorn)
        for _ in range(2):
            ask_each(service.server, 2)
            service.server.wait_for_log(
                rf"Listening at: http://127.0.0.1:{web.getsockname()[1]},http://127.0.0.1:{admin.getsockname()[1]} "
            )
            service.restart()
        ask_each(service.server, 2)
        assert len(loads(tmp_path)) == 1


def test_switched_off_again(make_service: Callable[..., Service], tmp_path: Path) -> None:
    service = make_service()
    ask_each(service.server, 2)
    service.server.env["GPUWORKER_FDSTORE"] = "off"
    service.restart()
    ask_each(service.server, 2)
    assert len(loads(tmp_path)) == 1
    assert service.manager.stored == []
    service.restart()
    ask_each(service.server, 2)
    assert len(loads(tmp_path)) == 2


def test_nothing_is_sent_unasked(make_service: Callable[..., Service]) -> None:
    service = make_service(env={})
    ask_each(service.server, 2)
    assert service.manager.stored == []
    assert not any("FDSTORE" in message for message in service.manager.messages)


def test_without_a_manager(make_server: Make) -> None:
    server = make_server(env={"GPUWORKER_FDSTORE": "on", "NOTIFY_SOCKET": ""}, devices="cpu")
    server.wait_for_workers(2)
    server.wait_for_log("No service manager keeps the shared objects over a restart: none has started this server")


def test_content_that_cannot_be_attached_is_loaded_anew(make_service: Callable[..., Service], tmp_path: Path) -> None:
    # Else no restart would ever help, since the manager keeps it.
    config = """
import os
from gpuworker.weights.cpu import CpuArena

def attach(self, fd, nbytes, mutable, attach=CpuArena.attach):
    if os.path.exists("break"):
        raise OSError("a broken arena")
    return attach(self, fd, nbytes, mutable=mutable)

def create(self, nbytes, create=CpuArena.create):
    if os.path.exists("break"):
        os.unlink("break")
    return create(self, nbytes)

CpuArena.attach, CpuArena.create = attach, create
"""
    service = make_service(config=config)
    first = digests(service)
    (tmp_path / "break").touch()
    service.restart()
    service.server.wait_for_log("shares.load is loaded anew, that of the last server cannot be used: .*a broken arena")
    assert digests(service) == first
    assert len(loads(tmp_path)) == 2
    assert service.manager.parked_fds() == FDS_OF_AN_OBJECT


def test_an_upgrade_leaves_the_manager_to_the_old_server(make_service: Callable[..., Service], tmp_path: Path) -> None:
    service = make_service()
    old = set(ask_each(service.server, 2))
    stored = service.manager.stored
    sent = len(service.manager.messages)
    service.server.signal(signal.SIGUSR2)
    pid_path = tmp_path / "gunicorn.pid.2"
    service.server.wait_for_log(" ready in ", 4)
    new = int(pid_path.read_text())
    assert service.manager.stored == stored
    assert not any("FDSTORE" in message for message in service.manager.messages[sent:])
    os.kill(new, signal.SIGTERM)
    wait_until(lambda: not is_running(new), "the new arbiter to go")
    assert set(ask_each(service.server, 2)) == old
    service.restart()
    ask_each(service.server, 2)
    assert len(loads(tmp_path)) == 1


# The real one.


@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/run/systemd/system").exists(), reason="needs root on a machine that runs systemd"
)
def test_a_real_systemd(tmp_path: Path) -> None:
    def systemctl(*args: str) -> str:
        done = subprocess.run(["systemctl", *args, unit], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def new_process(old: int) -> Process:
        def started() -> int:
            pid = int(systemctl("show", "--property=MainPID", "--value"))
            return pid if pid != old else 0

        return Process(wait_until(started, "the service"))

    (tmp_path / "seed").write_text("1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(tmp_path, "shares:app", bind=f"127.0.0.1:{port}", env=ON, devices="cpu")
    unit = f"gpuworker-test-{os.getpid()}.service"
    properties = {
        "Type": "notify",
        "FileDescriptorStoreMax": "1",
        "Restart": "always",
        "RestartSec": "0",
        "KillMode": "mixed",
        "WorkingDirectory": str(tmp_path),
        "StandardOutput": f"append:{server.log_path}",
        "StandardError": f"append:{server.log_path}",
    }
    run = ["systemd-run", f"--unit={unit}", *(f"--property={name}={value}" for name, value in properties.items())]
    run += [f"--setenv={name}={value}" for name, value in server.env.items()]
    subprocess.run([*run, *server.command], check=True, capture_output=True)
    try:
        server.process = new_process(0)  # type: ignore[assignment]
        first = {answer["digest"] for answer in ask_each(server, 2).values()}
        copies = memfds(server)
        for how in (["restart"], ["kill", "--signal=KILL"], ["restart"]):
            systemctl(*how)
            server.process = new_process(server.pid)  # type: ignore[assignment]
            assert {answer["digest"] for answer in ask_each(server, 2).values()} == first
            assert memfds(server) == copies
        assert len(loads(tmp_path)) == 1
        assert systemctl("show", "--property=NFileDescriptorStore", "--value") == "1"
    finally:
        systemctl("stop")
