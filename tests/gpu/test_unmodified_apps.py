"""The apps of the live tests that know nothing of gpuworker, on a real GPU: what a plain process answers there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import processes_on
from tests.live.test_unmodified_apps import (
    PLAIN,
    QUESTION,
    UNMODIFIED,
    Make,
    arenas,
    check,
    environment,  # noqa: F401
    home,  # noqa: F401
    imports,
    kill,
    save_models,
    start,  # noqa: F401
    stop,
)

NEEDS = {"speech:app": "silero_vad", "project.eager:application": "django", "language:app": "accelerate"}


@pytest.mark.parametrize(
    "app",
    [
        "reproduction:app",
        "language:app",
        "vision:app",
        "speech:app",
        "factory:create_app()",
        "project.eager:application",
    ],
)
def test_a_preloaded_app_answers_as_in_a_plain_process(
    start: Make,  # noqa: F811
    home: Path,  # noqa: F811
    environment: dict[str, str],  # noqa: F811
    tmp_path: Path,
    app: str,
) -> None:
    if app in NEEDS and not importlib.util.find_spec(NEEDS[app]):
        pytest.skip(f"needs {NEEDS[app]}")
    if app == "language:app":
        save_models(home)
    env = {**os.environ, **environment, "HOME": str(home)}
    env["PYTHONPATH"] = os.pathsep.join([str(UNMODIFIED), os.environ.get("PYTHONPATH", "")])
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN, app, str(QUESTION)],
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert plain.returncode == 0, plain.stderr
    expected = json.loads(plain.stdout.splitlines()[-1])
    server = start(app, "--preload", devices=None)
    check(server, expected)
    assert server.pid not in processes_on()
    kill(min(server.worker_pids()))
    check(server, expected)
    assert imports(tmp_path) == [server.pid]
    assert arenas(server) == 1
    stop(server)
