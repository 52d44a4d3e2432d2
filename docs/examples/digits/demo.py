"""Start two workers, ask them about digits no training has seen, stop them: ``python demo.py``.

It needs the weights that ``python train.py`` writes.
The exit code is 0 only if both workers answered, nearly every digit was right and the server stopped cleanly.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from data import held_out
from PIL import Image

HERE = Path(__file__).resolve().parent
WORKERS = 2
GUNICORN = ["gunicorn", "-k", "gpuworker.CudaWorker", "-w", str(WORKERS)]
#: Images in the table.
SHOWN = 8
#: Requests under way at a time.
CLIENTS = 4
#: Rounds of SHOWN requests to wait for an answer of each worker.
MOST_ROUNDS = 50
LOWEST_ACCURACY = 0.97
#: Seconds the server may take to be ready, to stop, and for one answer.
READY_LIMIT, STOP_LIMIT, ANSWER_LIMIT = 120.0, 60.0, 60.0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Server:
    """A gunicorn on a free port, for the length of a ``with`` block.

    :param folder: an empty folder for its log and its control socket.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "gunicorn.log"
        # gunicorn puts a control socket into one of these two, where another server may have one already. Packages
        # installed with pip --user are found through the home directory, unless told otherwise.
        home = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "PYTHONUSERBASE": site.getuserbase()}
        self._environ = {**os.environ, **home}
        self.port = 0

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", *GUNICORN, "--bind", "127.0.0.1:0", "app:app"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=HERE, env=self._environ, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self) -> str:
        """What gunicorn and the app have printed up to now."""
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """Stop the server and return its exit code; a second call only returns it.

        :raises subprocess.TimeoutExpired: if it does not stop by itself; it has been killed then.
        """
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_LIMIT)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_LIMIT
        while len(re.findall(r"Slot .* ready", self.log())) < WORKERS:
            if self._process.poll() is not None:
                raise DemoError(f"the server ended with exit code {self._process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise DemoError(f"the server was not ready within {READY_LIMIT:g} s")
            time.sleep(0.05)
        address = re.search(r"Listening at: http://127\.0\.0\.1:(\d+)", self.log())
        if not address:
            raise DemoError("the server's log does not say where it listens")
        self.port = int(address[1])


class Client:
    """Asks the server at `port`, several questions at a time."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, images: Iterable[np.ndarray]) -> list[dict[str, Any]]:
        """The answers for `images`, each (8, 8) of 0..16, in their order; every other image goes as PNG.

        :raises DemoError: for an answer other than 200.
        """
        bodies = [as_json(image) if i % 2 else as_png(image) for i, image in enumerate(images)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(self._post, bodies))

    def _post(self, typed_body: tuple[str, bytes]) -> dict[str, Any]:
        content_type, body = typed_body
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT)
        try:
            connection.request("POST", "/predict", body, {"Content-Type": content_type})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise DemoError(f"the answer to a good request is {response.status}: {answer.decode(errors='replace')}")
        return json.loads(answer)


def as_png(image: np.ndarray) -> tuple[str, bytes]:
    """`image` (8, 8) of 0..16 as a grey PNG of 0..255, after its content type."""
    file = io.BytesIO()
    Image.fromarray(np.round(image * 255 / 16).astype(np.uint8)).save(file, "PNG")
    return "image/png", file.getvalue()


def as_json(image: np.ndarray) -> tuple[str, bytes]:
    """`image` (8, 8) of 0..16 as JSON, after its content type."""
    return "application/json", json.dumps({"pixels": image.tolist()}).encode()


def main() -> int:
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        server = Server(Path(folder))
        try:
            return run(server)
        except (DemoError, OSError, HTTPException, subprocess.TimeoutExpired) as error:
            print(f"{server.log()}\nThe above is the server's log. The demo failed: {error}.", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted, and the server is stopped", file=sys.stderr)
            return 130


def leave(number: int, _: object) -> NoReturn:
    """End as by an exception, so that the server is stopped too."""
    sys.exit(128 + number)


def run(server: Server) -> int:
    """The demo, up to its exit code.

    :raises DemoError: if the server fails.
    """
    images, labels = held_out()
    print(f"starting {shlex.join(GUNICORN)} app:app")
    with server:
        client = Client(server.port)
        seen = show_table(client, images, labels)
        accuracy = float(np.mean([answer["digit"] for answer in client.ask(images)] == labels))
        print(f"\n{accuracy:.2%} of {len(images)} held-out images are right")
        code = server.stop()
    if code != 0:
        raise DemoError(f"the server stopped with exit code {code}")
    print("stopped cleanly")
    if len(seen) != WORKERS:
        raise DemoError(f"answers came from {len(seen)} of {WORKERS} workers")
    if accuracy < LOWEST_ACCURACY:
        raise DemoError(f"{accuracy:.2%} is below {LOWEST_ACCURACY:.0%}")
    print(by_hand(images[0]))
    return 0


def show_table(client: Client, images: np.ndarray, labels: np.ndarray) -> set[int]:
    """Print SHOWN answers, and the first of each worker that is not among them; return the slots seen."""
    print("\ntrue  answer  probability  slot  device    pid")
    seen: set[int] = set()
    for round_ in range(MOST_ROUNDS):
        for label, answer in zip(labels, client.ask(images[:SHOWN]), strict=False):
            slot = answer["worker"]["slot"]
            if round_ == 0 or slot not in seen:
                print(table_row(label, answer))
            seen.add(slot)
        if len(seen) == WORKERS:
            break
    return seen


def table_row(label: int, answer: dict[str, Any]) -> str:
    digit, worker = answer["digit"], answer["worker"]
    probability = answer["probabilities"][digit]
    return f"{label:4}  {digit:6}  {probability:11.4f}  {worker['slot']:4}  {worker['device']:6}  {worker['pid']:5}"


def by_hand(image: np.ndarray) -> str:
    """How to do the same from a shell."""
    pixels = json.dumps({"pixels": image.astype(int).tolist()}, separators=(",", ":"))
    return f"""
Try it by hand:
  cd {shlex.quote(str(HERE))}
  {shlex.join(GUNICORN)} app:app
and in another terminal:
  curl -H 'Content-Type: application/json' -d '{pixels}' http://127.0.0.1:8000/predict"""


if __name__ == "__main__":
    sys.exit(main())
