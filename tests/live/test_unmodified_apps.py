"""Apps that know nothing of gpuworker and put their model on "cuda" when they are imported, on the CPU stand-in."""

from __future__ import annotations

import concurrent.futures
import functools
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import APPS, Server, wait_until
from tests.live.test_share import ONE_THREAD, kill

Make = Callable[..., Server]
UNMODIFIED = APPS / "unmodified"
WORKERS = 2
QUESTION = 3
#: Holds every request a moment, so that the next one goes to another worker.
HOLD = "import time\ndef pre_request(worker, request):\n    time.sleep(0.1)\n"
#: Asks an app without a server.
PLAIN = """
import json, sys
from gunicorn.util import import_app
from werkzeug.test import Client
print(json.dumps(Client(import_app(sys.argv[1])).post("/", json=int(sys.argv[2])).json["result"]))
"""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the plain processes."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    return ONE_THREAD | {"MODELS": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def expected(home: Path, environment: dict[str, str]) -> Callable[[str], Any]:
    """What a plain process answers, which runs the same code with its models on the CPU."""
    (home / "go").touch()
    for file in UNMODIFIED.rglob("*.py"):
        copy = home / file.relative_to(UNMODIFIED)
        copy.parent.mkdir(exist_ok=True)
        code = file.read_text().replace(".cuda()", ".cpu()")
        copy.write_text(re.sub(r'"cuda(:0)?"', '"cpu"', code))

    @functools.cache
    def of(app: str) -> Any:
        if app == "language:app":
            save_models(home)
        env = {**os.environ, **environment, "HOME": str(home), "PYTHONPATH": str(home)}
        command = [sys.executable, "-c", PLAIN, app, str(QUESTION)]
        done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return of


def save_models(directory: Path) -> None:
    """Small ones of transformers, with random weights."""
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    bert, llama = transformers.BertConfig(**sizes), transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    transformers.BertModel(bert).save_pretrained(directory / "bert")
    transformers.LlamaForCausalLM(llama).save_pretrained(directory / "llama")


@pytest.fixture
def start(make_server: Make, environment: dict[str, str]) -> Make:
    """Starts an app."""

    def started(app: str, *args: str, threads: int = 1, env: dict[str, str] | None = None, **kwargs: Any) -> Server:
        args = ("--pythonpath", str(UNMODIFIED), "--threads", str(threads), *args)
        worker = "gpuworker.CudaWorker" if threads == 1 else "gpuworker.CudaThreadWorker"
        return make_server(app, *args, worker=worker, config=HOLD, env=environment | (env or {}), **kwargs)

    return started


def ask_each(server: Server) -> list[dict[str, Any]]:
    """The answers of all requests of a moment in which all workers lived and answered."""

    def all_of_them() -> list[dict[str, Any]] | None:
        assert server.process.poll() is None, "the server ended"
        with concurrent.futures.ThreadPoolExecutor(2 * WORKERS) as pool:
            answers = [answer for answer in pool.map(ask, [server] * 2 * WORKERS) if answer]
        pids = {answer["pid"] for answer in answers}
        return answers if len(pids) == WORKERS and pids == server.worker_pids() else None

    try:
        return wait_until(all_of_them, f"answers of {WORKERS} workers")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.log}") from None


def ask(server: Server) -> Any:
    """The answer; None if there is none, as when a worker has been killed."""
    try:
        status, body = server.post("/", json.dumps(QUESTION).encode(), "application/json")
    except (OSError, http.client.HTTPException):
        return None
    assert status == 200, body
    return json.loads(body)


def check(server: Server, result: Any) -> None:
    """All workers answer `result`, from a GPU as far as they can see."""
    for answer in ask_each(server):
        del answer["pid"]
        assert answer == {"result": result, "devices": ["cuda:0"], "is_cuda": True}, server.log


def stop(server: Server) -> None:
    """Without an accident in any process."""
    assert server.stop() == 0
    assert not re.search(r"Traceback|SIGABRT|SIGSEGV|terminate called", server.log), server.log


def imports(tmp_path: Path) -> list[int]:
    """The processes that imported the app."""
    return [int(pid) for pid in (tmp_path / "imports").read_text().split()]


def arenas(server: Server) -> int:
    """How many arenas were filled."""
    return len(re.findall(r"Loaded .+ on ", server.log))


TWO_DEVICES = "cpu,cpu"


@pytest.mark.parametrize(
    ("app", "threads", "devices"),
    [
        ("reproduction:app", 1, TWO_DEVICES),
        ("pool:app", 2, "cpu"),
        ("language:app", 1, TWO_DEVICES),
        ("vision:app", 1, "cpu"),
        ("speech:app", 1, TWO_DEVICES),
        ("factory:create_app()", 2, TWO_DEVICES),
        ("project.eager:application", 1, "cpu"),
    ],
)
def test_a_preloaded_app_shares_its_model(
    start: Make, expected: Callable[[str], Any], tmp_path: Path, app: str, threads: int, devices: str
) -> None:
    result = expected(app)
    server = start(app, "--preload", threads=threads, devices=devices)
    check(server, result)
    kill(min(server.worker_pids()))
    check(server, result)
    server.reload()
    check(server, result)
    assert imports(tmp_path) == [server.pid]
    assert arenas(server) == len(devices.split(","))
    stop(server)


@pytest.mark.parametrize(
    ("app", "threads"),
    [
        ("reproduction:app", 1),
        ("language:app", 1),
        ("vision:app", 1),
        ("speech:app", 1),
        ("factory:create_app()", 2),
        ("project.wsgi:application", 1),
        ("background:app", 2),
    ],
)
def test_an_app_that_each_worker_imports(
    start: Make, expected: Callable[[str], Any], tmp_path: Path, app: str, threads: int
) -> None:
    result = expected(app)
    server = start(app, threads=threads, devices="cpu").wait_ready()
    (tmp_path / "go").touch()
    check(server, result)
    assert sorted(imports(tmp_path)) == sorted(server.worker_pids())
    assert arenas(server) == 0
    stop(server)


def test_a_preloaded_app_that_imports_its_model_in_a_request(
    start: Make, expected: Callable[[str], Any], tmp_path: Path
) -> None:
    result = expected("project.wsgi:application")
    server = start("project.wsgi:application", "--preload", threads=2)
    check(server, result)
    assert sorted(imports(tmp_path)) == sorted(server.worker_pids())
    assert arenas(server) == 0
    stop(server)


@pytest.mark.parametrize("thread", ["a daemon", "not a daemon"])
def test_a_thread_that_the_fork_would_lose_stops_the_start(start: Make, thread: str) -> None:
    server = start("background:app", "--preload", env={"THREAD": thread})
    assert server.wait() != 0
    assert server.log.count("background.py") == 1, server.log
    assert re.search(r"thread.*without --preload", server.log, re.DOTALL), "what is wrong, and what to do"
    assert "Traceback" not in server.log
    assert "Booting worker" not in server.log
    assert not server.pid_path.exists()
