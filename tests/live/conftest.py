from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live.server import MARK, REPOSITORY, Server, marked_processes, wait_until

#: Where `make test` puts older versions, one directory each.
OTHER_GUNICORNS = sorted((REPOSITORY / ".venv" / "gunicorns").glob("*"))


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process, a descriptor or a temporary file."""
    mark = str(tmp_path)
    monkeypatch.setenv(MARK, mark)
    before = set(os.listdir("/proc/self/fd"))
    yield
    try:
        wait_until(lambda: not list(marked_processes(mark)), "the end of all processes of this test", 10)
    finally:
        for pid in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert set(os.listdir("/proc/self/fd")) <= before
    # torch makes an empty directory for its compiler when an optimizer is imported.
    assert not [path for path in tmp_path.glob("tmp/*") if not path.name.startswith("torchinductor_")]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*args: object, **kwargs: object) -> Server:
            server = Server(tmp_path, *args, **kwargs)  # type: ignore[arg-type]
            return stack.enter_context(server)

        yield make


@pytest.fixture(params=[None, *OTHER_GUNICORNS], ids=lambda path: path.name if path else "newest")
def gunicorn(request: pytest.FixtureRequest) -> Path | None:
    """Every gunicorn version the core of the live tests runs on."""
    path: Path | None = request.param
    return path
