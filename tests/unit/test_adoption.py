from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuworker.arbiter import adoption
from gpuworker.arbiter.adoption import VARIABLE, Inheritance, hand_over, handed_over
from gpuworker.arbiter.manager import ServiceManager, name_of
from gpuworker.weights.store import ADOPTED, Entry, Store
from tests.unit.children import run_child

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

LOG = logging.getLogger("test")
KEY = ("cpu", 0)


@pytest.fixture(autouse=True)
def _no_fd_leaks() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def old() -> Iterator[Store]:
    """The store of the server before, with something that lasts and something that does not."""
    store = Store()
    fd = os.memfd_create("test")
    store.publish(Entry("lasting", "a", 3, (1,), lasting=True), [fd])
    store.publish(Entry("other", "b", 4, (1,)), [fd])
    os.close(fd)
    yield store
    store.close()


@pytest.fixture
def inheritance() -> Iterator[Inheritance]:
    inheritance = Inheritance(ServiceManager())
    yield inheritance
    inheritance.close(LOG)


def handed(old: Store) -> dict[str, str]:
    """An environment that hands `old` over, by a descriptor that is the receiver's to close."""
    environ: dict[str, str] = {}
    hand_over(environ, {KEY: old})
    told = json.loads(environ[VARIABLE])
    told["stores"][0][2] = os.dup(old.fd)
    return {VARIABLE: json.dumps(told)}


# By USR2.


def test_what_lasts_is_taken_over(old: Store, inheritance: Inheritance, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environ = handed(old)
    inheritance.take(environ)
    assert environ == {}
    store = inheritance.pop(KEY)
    assert store.entries() == [Entry("lasting", "a", ADOPTED, (1,), lasting=True)]
    assert [entry.name for entry in old.entries()] == ["lasting", "other"], "it is the other's still"
    inheritance.close(LOG)
    assert caplog.messages == ["The last server left on cpu: lasting"]
    old.clear()
    found = store.find("a")
    assert found
    os.close(found[1][0])
    store.close()


def test_what_no_device_takes_is_closed(old: Store, inheritance: Inheritance) -> None:
    inheritance.take(handed(old))
    store = inheritance.pop(("cpu", 1))
    assert store.entries() == []
    store.close()


def test_a_store_of_which_only_the_reading_end_is_left(old: Store, inheritance: Inheritance) -> None:
    environ = handed(old)
    old.close()
    inheritance.take(environ)
    store = inheritance.pop(KEY)
    assert [entry.name for entry in store.entries()] == ["lasting"]
    store.close()


def test_an_empty_store_of_a_server_that_is_gone(inheritance: Inheritance) -> None:
    old = Store()
    environ = handed(old)
    old.close()
    inheritance.take(environ)
    store = inheritance.pop(KEY)
    assert store.entries() == []
    store.close()


def test_the_descriptors_are_inherited_after_the_hand_over_only(old: Store) -> None:
    assert not os.get_inheritable(old.fd)
    environ = {"LISTEN_FDNAMES": "web", "OTHER": "1"}
    hand_over(environ, {KEY: old})
    assert os.get_inheritable(old.fd)
    assert environ.pop(VARIABLE)
    assert environ == {"OTHER": "1"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "7",
        "{}",
        '{"pid": 1}',
        '{"pid": 1, "stores": 7}',
        '{"pid": 1, "stores": [[1, 2, 3]]}',
        '{"pid": 1, "stores": [["cpu", "x", 3, 4]]}',
        '{"pid": 1, "stores": [["cpu", 0, 3, 4]]}',
    ],
)
def test_a_bad_variable(text: str, inheritance: Inheritance, caplog: pytest.LogCaptureFixture) -> None:
    environ = {VARIABLE: text}
    inheritance.take(environ)
    assert environ == {}
    inheritance.close(LOG)
    assert f"Cannot use what the last server left: {VARIABLE}" in caplog.text


def test_descriptors_that_are_something_else_now_are_left_alone(old: Store, tmp_path: Path) -> None:
    told = {"pid": os.getpid(), "stores": [["cpu", 0, old.fd, 1], ["cpu", 1, 10**6, 1]]}
    assert handed_over({VARIABLE: json.dumps(told)}) == []
    with (tmp_path / "file").open("w") as file:
        told["stores"] = [["cpu", 0, file.fileno(), os.fstat(file.fileno()).st_ino]]
        assert handed_over({VARIABLE: json.dumps(told)}) == []
        file.write("still open")


@pytest.mark.parametrize("message", [b"", b"[", b"[1]", b'[{"fds": 1}]', b'[{"name": "a", "sizes": [], "fds": 0}]'])
def test_content_of_another_version(message: bytes, inheritance: Inheritance, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [message or b" "], [ours.fileno()])
        told = [*KEY, os.dup(theirs.fileno()), os.fstat(theirs.fileno()).st_ino]
        inheritance.take({VARIABLE: json.dumps({"pid": os.getpid(), "stores": [told]})})
    inheritance.close(LOG)
    assert "Cannot use the store of cpu that the last server left" in caplog.text


def test_hooks_that_fail_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Cfg:
        calls = 0

        def on_exit(self, server: object) -> None:
            self.calls += 1

        pre_exec = on_exit

        def set(self, name: str, value: object) -> None:
            setattr(self, name, value)

    class Server:
        log = LOG

    cfg, store = Cfg(), Store()
    adoption.follow(cfg, {KEY: store}, ServiceManager())
    store.close()
    cfg.on_exit(Server())
    cfg.pre_exec(Server())
    assert cfg.calls == 2
    assert caplog.messages == ["gpuworker failed in on_exit", "gpuworker failed in pre_exec"]


# By a service manager.


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["gpuworker-0-cpu"], []),
        (["web", "gpuworker-0-cpu"], ["web"]),
        (
            ["gpuworker-0-cpu", "web", "gpuworker-1-cpu", "stored", "gpuworker-x-cpu"],
            ["web", "stored", "gpuworker-x-cpu"],
        ),
    ],
)
def test_what_comes_back_is_taken_out_of_what_gunicorn_sees(names: list[str], left: list[str]) -> None:
    def child() -> None:
        count = len(names)
        for number, name in enumerate(names):
            fd = os.memfd_create(name)
            os.dup2(fd, 100 + number)
        os.closerange(3, 100)
        for number in range(count):
            os.dup2(100 + number, 3 + number)
        os.closerange(100, 1000)
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": ":".join(names)}
        manager = ServiceManager()
        found = manager.take_back(environ)
        assert {name_of(key): os.readlink(f"/proc/self/fd/{fd}") for key, fd in found} == {
            name: f"/memfd:{name} (deleted)" for name in names if name not in left
        }
        assert not any(os.get_inheritable(fd) for _, fd in found)
        assert [os.readlink(f"/proc/self/fd/{3 + n}").split(":")[1].split()[0] for n in range(len(left))] == left
        assert all(os.get_inheritable(3 + n) for n in range(len(left)))
        assert environ == (
            {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(left)), "LISTEN_FDNAMES": ":".join(left)}
            if left
            else {}
        )
        for _, fd in found:
            os.close(fd)
        assert {int(fd) for fd in os.listdir("/proc/self/fd")} - {0, 1, 2} <= set(range(3, 4 + len(left)))

    run_child(child)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "gpuworker-0-cpu"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "web:gpuworker-0-cpu"},
    ],
)
def test_what_is_not_ours_stays_as_it_is(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert ServiceManager().take_back(environ) == []
    assert environ == before


def received(sock: socket.socket) -> list[tuple[str, int]]:
    """The messages that the manager got, each with its number of descriptors."""
    messages = []
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, 4096, 8)
        except BlockingIOError:
            return messages
        for fd in fds:
            os.close(fd)
        messages.append((data.decode(), len(fds)))


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def test_each_store_is_handed_over_once(old: Store, notified: socket.socket) -> None:
    manager, environ = ServiceManager(), {"NOTIFY_SOCKET": notified.getsockname()}
    manager.keep({KEY: old}, environ, LOG)
    assert manager.keeps
    store, remove = "FDSTORE=1\nFDNAME=gpuworker-0-cpu\nFDPOLL=0", "FDSTOREREMOVE=1\nFDNAME=gpuworker-0-cpu"
    assert received(notified) == [(remove, 0), (store, 1)]
    manager.keep({KEY: old}, environ, LOG)
    assert received(notified) == []
    manager.keep({KEY: old, ("GPU-1", 0): old}, environ, LOG)
    assert received(notified) == [(m.replace("cpu", "GPU-1"), n) for m, n in ((remove, 0), (store, 1))]
    manager.keep({}, environ, LOG)
    assert not manager.keeps
    assert received(notified) == [(remove.replace("cpu", "GPU-1"), 0), (remove, 0)]


@pytest.mark.parametrize("address", [None, "", "/nowhere", "vsock:2:3", "@nobody"])
def test_without_a_manager(old: Store, address: str | None, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager()
    environ = {"NOTIFY_SOCKET": address} if address is not None else {}
    manager.keep({}, environ, LOG)
    assert caplog.messages == []
    for _ in range(2):
        manager.keep({KEY: old}, environ, LOG)
    assert not manager.keeps
    (message,) = caplog.messages
    assert message.startswith("No service manager keeps the shared objects over a restart: ")
