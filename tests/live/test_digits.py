"""The example: every held-out image through a running server, compared with the model called directly."""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import REPOSITORY, Server

EXAMPLE = REPOSITORY / "docs" / "examples" / "digits"


@pytest.fixture(scope="module")
def example() -> Any:
    """The example's modules, with weights."""
    import importlib

    if not (EXAMPLE / "digits.safetensors").exists():
        subprocess.run([sys.executable, EXAMPLE / "train.py"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield importlib.import_module("model"), importlib.import_module("data")


def post(server: Server, body: bytes, kind: str) -> tuple[int, Any]:
    status, answer = server.post("/predict", body, kind)
    return status, json.loads(answer)


def as_png(image: Any) -> bytes:
    import numpy
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray((image * 255 / 16).round().astype(numpy.uint8)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("worker", ["gpuworker.CudaWorker", "gpuworker.CudaThreadWorker"])
def test_every_held_out_image(make_server: Callable[..., Server], example: Any, worker: str) -> None:
    import torch

    model, data = example
    images, labels = data.held_out()
    net = model.load(model.WEIGHTS)
    with torch.inference_mode():
        direct = torch.stack([net(torch.as_tensor(image / 16).float().reshape(1, 1, 8, 8))[0] for image in images])
    expected = direct.softmax(1)
    server = make_server("app:app", "--chdir", str(EXAMPLE), worker=worker).wait_ready()

    def ask(image: Any) -> list[float]:
        status, answer = post(server, json.dumps({"pixels": image.tolist()}).encode(), "application/json")
        assert status == 200, answer
        assert answer["digit"] == max(range(10), key=answer["probabilities"].__getitem__)
        return answer["probabilities"]  # type: ignore[no-any-return]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = torch.tensor(list(pool.map(ask, images)))
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-5)
    accuracy = (answers.argmax(1).numpy() == labels).mean()
    assert accuracy >= 0.97


def test_an_image_as_png(make_server: Callable[..., Server], example: Any) -> None:
    _, data = example
    images, labels = data.held_out()
    server = make_server("app:app", "--chdir", str(EXAMPLE)).wait_ready()
    answers = [post(server, as_png(image), "image/png") for image in images[:20]]
    assert [status for status, _ in answers] == [200] * 20
    assert sum(answer["digit"] == label for (_, answer), label in zip(answers, labels[:20], strict=True)) >= 19


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"no image", "image/png", 400),
        (b"{", "application/json", 400),
        (b'{"pixels": [[1]]}', "application/json", 400),
        (b'{"pixels": 7}', "application/json", 400),
        (b"hello", "text/plain", 415),
    ],
)
def test_bad_input_is_answered_with_a_reason(
    make_server: Callable[..., Server], example: Any, body: bytes, kind: str, status: int
) -> None:
    server = make_server("app:app", "--chdir", str(EXAMPLE), workers=1).wait_ready(1)
    answered, answer = post(server, body, kind)
    assert answered == status
    assert answer["error"]


def test_the_demo(tmp_path: Path, example: Any) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, EXAMPLE / "demo.py"]
    demo = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "stopped cleanly" in demo.stdout
