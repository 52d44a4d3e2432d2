"""The least a WSGI app can be: tells its pid, slot and user."""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import gpuworker


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "application/json")])
    answer = {"pid": os.getpid(), "slot": gpuworker.slot(), "device": str(gpuworker.device()), "uid": os.getuid()}
    return [json.dumps(answer).encode()]
