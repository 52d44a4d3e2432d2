"""A request that breaks the device or uses up its memory, with a device that does so when told to."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from typing import Any

import flask
import pytest
import torch
from werkzeug.test import Client
from werkzeug.wsgi import FileWrapper

from gpuworker import faults

OOM = torch.cuda.OutOfMemoryError


class Device:
    """A fake of the driver's edge."""

    def __init__(self) -> None:
        self.lost = ""
        self.failed = 0
        self.used = 100 << 20
        self.given_back = 0

    def problem(self) -> str:
        return self.lost

    def ooms(self) -> int:
        return self.failed

    def own_bytes(self) -> int:
        return self.used

    def give_back(self) -> None:
        self.given_back += 1


class Server:
    """An app on a watched device."""

    def __init__(self, app: Any) -> None:
        self.device = Device()
        self.retired = 0
        self.watch = faults.Watch(app, self.device, logging.getLogger("test"), 3, self._retire)
        self.client = Client(self.watch)

    def _retire(self) -> None:
        self.retired += 1


@pytest.fixture
def app() -> flask.Flask:
    return flask.Flask(__name__)


@pytest.fixture
def server(app: flask.Flask) -> Server:
    server = Server(app)
    device = server.device

    @app.get("/")
    def fine() -> str:
        return "fine"

    @app.get("/quiet")
    def quiet() -> str:
        """The kernel fails behind the app's back."""
        device.lost = "CUDA error: device-side assert triggered"
        return "wrong"

    @app.get("/loud")
    def loud() -> str:
        device.lost = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(device.lost)

    @app.get("/stream")
    def stream() -> flask.Response:
        def parts() -> Iterable[str]:
            yield "one"
            device.lost = "CUDA error: unspecified launch failure"
            yield "two"

        return flask.Response(parts())

    @app.get("/oom")
    def oom() -> str:
        device.failed += 1
        raise OOM("CUDA out of memory. Tried to allocate 90 GiB")

    @app.get("/bug")
    def bug() -> str:
        raise ValueError

    return server


def test_a_healthy_request(server: Server) -> None:
    assert server.client.get("/").text == "fine"
    assert server.client.get("/bug").status_code == 500
    assert (server.retired, server.device.given_back) == (0, 0)


@pytest.mark.parametrize("path", ["/quiet", "/loud"])
def test_a_lost_device_gives_an_error_and_ends_the_worker(
    server: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = server.client.get(path)
    assert response.status_code >= 500
    assert "wrong" not in response.text
    assert server.retired == 1
    (record,) = [record for record in caplog.records if record.name == "test"]
    assert f"Slot 3 has lost its device over GET {path}: {server.device.lost}" in record.getMessage()
    assert ("shared weights are read-only" in record.getMessage()) == (path == "/loud")


def test_nothing_runs_on_a_lost_device(server: Server) -> None:
    server.client.get("/quiet")
    server.device.lost = ""
    response = server.client.get("/")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert server.retired == 1


def test_an_error_the_app_lets_through_stays_the_servers(app: flask.Flask, server: Server) -> None:
    app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        server.client.get("/loud")
    assert server.retired == 1


def test_a_device_lost_while_the_response_is_sent(server: Server) -> None:
    with server.client.get("/stream") as response:
        assert response.text == "onetwo"
    assert server.retired == 1


def test_out_of_memory_that_the_app_lets_through(app: flask.Flask, server: Server) -> None:
    app.config["PROPAGATE_EXCEPTIONS"] = True
    response = server.client.get("/oom")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert (server.device.given_back, server.retired) == (1, 0)


def test_out_of_memory_that_the_app_answers(server: Server) -> None:
    assert server.client.get("/oom").status_code == 500
    assert (server.device.given_back, server.retired) == (1, 0)


def test_the_error_handler_for_out_of_memory(app: flask.Flask, server: Server) -> None:
    app.register_error_handler(OOM, faults.out_of_memory)
    response = server.client.get("/oom")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert (server.device.given_back, server.retired) == (1, 0)


def test_out_of_memory_under_another_error(app: flask.Flask, server: Server) -> None:
    app.config["PROPAGATE_EXCEPTIONS"] = True

    @app.get("/wrapped")
    def wrapped() -> str:
        server.device.failed += 1
        try:
            raise OOM("CUDA out of memory")
        except OOM as error:
            raise KeyError("cache") from error

    assert server.client.get("/wrapped").status_code == 503


def test_memory_that_does_not_come_back_ends_the_worker(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for expected in (0, 0, 1, 1):
        server.device.used = 2 << 30
        server.client.get("/oom")
        assert server.retired == expected
    assert "ran out of memory 3 times and still holds 2.00 GiB" in caplog.text


def test_memory_that_comes_back_does_not(server: Server) -> None:
    for used in (2 << 30, 2 << 30, 100 << 20, 2 << 30, 2 << 30):
        server.device.used = used
        server.client.get("/oom")
    assert server.retired == 0


def test_tracebacks_in_cycles_are_broken(app: flask.Flask, server: Server) -> None:
    freed: list[str] = []

    class Tensor:
        def __init__(self) -> None:
            self.error: BaseException | None = None

        def __del__(self) -> None:
            freed.append("tensor")

    @app.get("/cycle")
    def cycle() -> str:
        tensor = Tensor()
        server.device.failed += 1
        try:
            raise OOM("CUDA out of memory")
        except OOM as error:
            tensor.error = error  # whose traceback holds the frame, which holds the tensor
            raise

    app.logger.disabled = True  # pytest would keep what is logged
    gc.disable()
    try:
        assert server.client.get("/cycle").status_code == 500
    finally:
        gc.enable()
    assert freed == ["tensor"]


def test_the_old_way_to_send_a_body(app: flask.Flask) -> None:
    def writes(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        write = start_response("200 OK", [("Content-Type", "text/plain")])
        write(b"one")
        write(b"two")
        return [b"three"]

    assert Server(writes).client.get("/").text == "onetwothree"


def test_an_app_that_starts_its_response_late(app: flask.Flask) -> None:
    def late(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield b"late"

    assert Server(late).client.get("/").text == "late"


def test_bodies_pass_as_they_are(app: flask.Flask) -> None:
    def plain(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", [])
        return bodies[environ["PATH_INFO"]]

    class File(FileWrapper):
        pass

    bodies: dict[str, Any] = {"/list": [b"x"], "/file": File(open("/dev/null", "rb"))}  # noqa: SIM115
    watch = faults.Watch(plain, Device(), logging.getLogger("test"), 0, lambda: None)
    for path, body in bodies.items():
        assert watch({"PATH_INFO": path, "wsgi.file_wrapper": File}, lambda *args: None) is body
    bodies["/file"].close()


def test_cpu_devices_are_never_lost() -> None:
    health = faults.CpuHealth()
    health.give_back()
    assert (health.problem(), health.ooms(), health.own_bytes()) == ("", 0, 0)
