"""A real gunicorn in a process of its own, for tests (the idea is werkzeug's ``DevServerClient``)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).parents[2]
APPS = Path(__file__).parent / "apps"
#: Every process of a test carries this variable, so that the leak check finds it.
MARK = "LIVE_TEST_MARK"
GENEROUS = 120.0

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, limit: float = GENEROUS) -> T:
    """The first true value of `condition`, polled."""
    end = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit:g} s in vain for {what}")
        time.sleep(0.02)
    return value


@dataclasses.dataclass(frozen=True)
class Answer:
    """What ``GET /where`` of the test apps tells about the worker that answered."""

    pid: int
    slot: int
    device: str
    more: Mapping[str, Any]


class Server:
    """gunicorn with ``-k gpuworker.CudaWorker``, on a free port of the loopback interface.

    :param gunicorn: the directory of another version, put first on the path.
    :param worker: the worker class; None leaves it to `config`.
    """

    def __init__(
        self,
        tmp_path: Path,
        app: str = "where:app",
        *args: str,
        workers: int | None = 2,
        worker: str | None = "gpuworker.CudaWorker",
        bind: str | None = "127.0.0.1:0",
        config: str = "",
        env: Mapping[str, str] | None = None,
        gunicorn: Path | None = None,
        devices: str | None = "cpu,cpu",
    ) -> None:
        self.tmp_path = tmp_path
        self.log_path = tmp_path / "server.log"
        self.pid_path = tmp_path / "gunicorn.pid"
        self._config_path = tmp_path / "gunicorn.conf.py"
        self.write_config(config)
        (tmp_path / "tmp").mkdir(exist_ok=True)
        # Not `python -m gunicorn`: USR2 starts what argv names, which then would be a file inside the package.
        script = tmp_path / "gunicorn"
        script.write_text("from gunicorn.app.wsgiapp import run\n\nrun()\n")
        command = [sys.executable, str(script), "-c", str(self._config_path), "--pid", str(self.pid_path)]
        command += ["-k", worker] if worker else []
        command += ["-w", str(workers)] if workers else []
        command += ["-b", bind] if bind else []
        self.command = [*command, *args, app]
        path = [str(p) for p in (gunicorn, REPOSITORY, APPS) if p]
        self.env = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("GPUWORKER_", "CUDA_VISIBLE"))
            },
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "HOME": str(tmp_path),  # gunicorn's control socket
            "XDG_RUNTIME_DIR": str(tmp_path),
            "TMPDIR": str(tmp_path / "tmp"),
            **({"GPUWORKER_DEVICES": devices} if devices else {}),
            **(env or {}),
        }
        self.process: subprocess.Popen[bytes]

    def write_config(self, text: str) -> None:
        self._config_path.write_text(text)

    # Life

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, pass_fds: Sequence[int] = ()) -> Server:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.tmp_path,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
            )
        return self

    def stop(self) -> int:
        """SIGTERM if it still runs; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait()

    def wait(self, limit: float = GENEROUS) -> int:
        """The exit code of a server that ends by itself."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end in {limit:g} s\n{self.log}") from None

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def reload(self) -> None:
        """HUP, until the old workers are gone."""
        old = self.worker_pids()
        self.signal(signal.SIGHUP)
        try:
            wait_until(lambda: not any(map(is_running, old)), "the old workers to leave")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    # Log

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern: str, count: int = 1, limit: float = GENEROUS) -> list[re.Match[str]]:
        """The matches of `pattern` in the log, at least `count`."""

        def matches() -> list[re.Match[str]] | None:
            found = list(re.finditer(pattern, self.log))
            if len(found) >= count:
                return found
            assert self.process.poll() is None, f"the server ended, no {pattern!r} in its log:\n{self.log}"
            return None

        try:
            return wait_until(matches, repr(pattern), limit)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def wait_ready(self, workers: int = 2) -> Server:
        self.wait_for_log(r"Slot \d+ on .* ready", workers)
        return self

    # Workers

    def worker_pids(self) -> set[int]:
        """Living children of the arbiter."""
        return {pid for pid in children(self.pid) if is_running(pid)}

    def wait_for_workers(self, count: int, slots: set[int] | None = None) -> dict[int, Answer]:
        """All workers by slot, once exactly `count` live and each has answered, holding `slots` (0 … count-1)."""
        expected = slots or set(range(count))

        def all_of_them() -> dict[int, Answer] | None:
            if len(self.worker_pids()) != count:
                return None
            answers = {answer.pid: answer for answer in self.ask_all(count)}
            by_slot = {answer.slot: answer for answer in answers.values()}
            complete = set(answers) == self.worker_pids() and set(by_slot) == expected
            return by_slot if complete and len(answers) == count else None

        try:
            return wait_until(all_of_them, f"{count} workers in slots {sorted(expected)}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def ask_all(self, count: int) -> list[Answer]:
        """Answers of different workers, as far as they come: each is held a moment, so the next goes to another."""
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self.where, hold=0.1) for _ in range(count)]
            return [answer for future in futures if (answer := future.result())]

    # Requests

    @property
    def port(self) -> int:
        return int(self.wait_for_log(r"Listening at: https?://127\.0\.0\.1:(\d+)")[0][1])

    def get(self, path: str, timeout: float = GENEROUS) -> tuple[int, bytes]:
        return self._request("GET", path, timeout)

    def post(self, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        return self._request("POST", path, GENEROUS, body, {"Content-Type": kind})

    def _request(self, method: str, path: str, timeout: float, *more: Any) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, *more)
            response = connection.getresponse()
            return response.status, response.read()

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, (status, body, self.log)
        return json.loads(body)

    def where(self, hold: float = 0.0) -> Answer | None:
        """Who answers; None if it died over it."""
        try:
            answer = self.json(f"/where?hold={hold}")
        except (OSError, http.client.HTTPException):
            return None
        return Answer(answer.pop("pid"), answer.pop("slot"), answer.pop("device"), answer)


class Load:
    """Requests without a pause, from `clients` threads, while the block runs; every outcome is counted."""

    def __init__(self, server: Server, clients: int = 2, path: str = "/where") -> None:
        self._server, self._path = server, path
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self._clients = clients
        self._on = True
        self.good = 0
        self.failures: list[str] = []
        self.slowest = 0.0

    def __enter__(self) -> Load:
        self._futures = [self._pool.submit(self._ask) for _ in range(self._clients)]
        return self

    def stop_asking(self) -> None:
        """Let the requests that are under way be the last."""
        self._on = False

    def __exit__(self, *exc: object) -> None:
        self.stop_asking()
        self._pool.shutdown(wait=True)
        for future in self._futures:
            future.result()

    def _ask(self) -> None:
        while self._on:
            start = time.monotonic()
            try:
                status, body = self._server.get(self._path)
                if status == 200:
                    self.good += 1
                else:
                    self.failures.append(f"{status} {body[:200]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            self.slowest = max(self.slowest, time.monotonic() - start)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    """Whether `pid` is there and not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    # While a thread of it is still ending, a zombie has its files open.
    return threads > 1 or status.rsplit(")", 1)[1].split()[0] not in "ZX"


def marked_processes(mark: str) -> Iterator[int]:
    """Processes that carry `mark` in the environment they were started with, except this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes() and is_running(int(entry.name)):
                    yield int(entry.name)
