"""Builds its model in a thread, which in a test ends when there is a file `go`; of a kind that THREAD tells."""

import os
import threading
import time
from pathlib import Path

import flask
import telling
import torch

telling.note_import()
ready = threading.Event()


def build() -> None:
    global model
    while not Path(os.environ["HOME"], "go").exists():
        time.sleep(0.02)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 4).to("cuda").eval()
    ready.set()


threading.Thread(target=build, daemon=os.environ.get("THREAD") != "not a daemon").start()
app = flask.Flask(__name__)


@app.post("/")
def infer() -> dict[str, object]:
    ready.wait()
    x = torch.full((64,), float(flask.request.get_json()), device="cuda")
    with torch.no_grad():
        y = model(x)
    return telling.answer(y.tolist(), model.weight, x, y)
