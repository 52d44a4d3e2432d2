from __future__ import annotations

import sys
from types import FrameType

import pytest

from gpuworker.arbiter.guard import place_in_the_app


def frame_of(filename: str) -> FrameType:
    """A frame as if called from `filename`, from this test, which is an app's own code."""
    found: dict[str, FrameType] = {}
    exec(compile("\n\nfound['frame'] = sys._getframe()", filename, "exec"), {"found": found, "sys": sys})
    return found["frame"]


@pytest.mark.parametrize(
    "library",
    [
        "/usr/lib/python3/dist-packages/flask/app.py",
        "/home/somebody/.local/lib/python3.11/site-packages/flask/app.py",
        f"{sys.prefix}/lib/python3.11/site-packages/flask/app.py",
    ],
)
def test_a_line_of_a_library_is_not_of_the_app(library: str) -> None:
    place = place_in_the_app(frame_of(library))
    assert place
    assert place[0] == __file__


def test_a_line_of_the_app() -> None:
    assert place_in_the_app(frame_of("/srv/app/main.py")) == ("/srv/app/main.py", 3)
