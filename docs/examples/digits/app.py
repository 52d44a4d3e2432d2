"""A plain Flask app that names handwritten digits. Nothing here knows about gunicorn.

``POST /predict`` takes a PNG (``image/png``) or pixels (``application/json``), ``GET /health`` says that the app is up.
Every error answer is JSON: ``{"error": "..."}``.
"""

from __future__ import annotations

import io
import json
import os
import reprlib
from typing import Any

import numpy as np
import torch
from flask import Flask, Response, request
from model import INK, SIZE, load, to_input
from PIL import Image
from werkzeug.exceptions import BadRequest, HTTPException, RequestEntityTooLarge, UnsupportedMediaType

import gpuworker

#: Bytes a request body may have; an image needs some hundred.
LARGEST_BODY = 64 * 1024
JSON_WANTED = f'Send {{"pixels": [...]}}: {SIZE} rows of {SIZE} numbers from 0 (paper) to {INK:g} (ink).'
PNG_WANTED = f"Send a grey PNG of {SIZE}x{SIZE} pixels, 8 bits each, from 0 (paper) to 255 (ink)."

app = Flask(__name__)
app.config["MAX_CONTENT_LENGTH"] = LARGEST_BODY
model = gpuworker.share(load)


@app.post("/predict")
def predict() -> dict[str, Any]:
    """The digit in the image of the request body, and which worker said so."""
    probabilities = probabilities_of(image_of_request())
    return {
        "digit": int(probabilities.argmax()),
        "probabilities": probabilities.tolist(),
        "worker": {"pid": os.getpid(), "slot": gpuworker.slot(), "device": str(gpuworker.device())},
    }


@app.get("/health")
def health() -> dict[str, str]:
    """An answer without the model, for load balancers."""
    return {"status": "ok"}


@torch.inference_mode()
def probabilities_of(image: np.ndarray) -> torch.Tensor:
    """The probability of each digit, float32 (10,), for `image` (8, 8) of 0..16."""
    logits = model(to_input(image[np.newaxis]).to(gpuworker.device()))
    return logits.softmax(dim=1)[0].cpu()


def image_of_request() -> np.ndarray:
    """The image in the request body, float32 (8, 8) of 0..16.

    :raises HTTPException: if there is none; its description says what was given, what is allowed and what to do.
    """
    if request.mimetype == "image/png":
        return image_of_png(body_of_request())
    if request.mimetype == "application/json":
        return image_of_json(body_of_request())
    given = f"The content type is {_shown(request.mimetype)}" if request.mimetype else "There is no content type"
    raise UnsupportedMediaType(f"{given}. Set the Content-Type header to image/png or application/json.")


def body_of_request() -> bytes:
    """The whole request body.

    :raises RequestEntityTooLarge: if it is over the limit.
    """
    body = request.get_data()
    # Of a body sent in chunks, which do not say how many will come, Werkzeug silently cuts what is over the limit.
    if request.content_length is None and len(body) == LARGEST_BODY:
        raise RequestEntityTooLarge
    return body


def image_of_png(body: bytes) -> np.ndarray:
    """The image in a PNG file; its 0..255 become 0..16.

    :raises BadRequest: for anything but an 8 bit grey PNG of 8x8 pixels.
    """
    try:
        image = Image.open(io.BytesIO(body), formats=["PNG"])
        # Before anything is decoded: a small file can hold a huge image.
        _check_format(image)
        image.load()
    except BadRequest:
        raise
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise BadRequest(f"The body, {len(body)} bytes, is not a PNG that can be read. {PNG_WANTED}") from error
    return np.asarray(image, dtype=np.float32) * (INK / 255)


def _check_format(image: Image.Image) -> None:
    if image.size != (SIZE, SIZE):
        raise BadRequest(f"The image has {image.width}x{image.height} pixels. {PNG_WANTED}")
    if image.mode != "L":
        raise BadRequest(f"The image is of Pillow's mode {image.mode}, not of mode L, 8 bit grey. {PNG_WANTED}")


def image_of_json(body: bytes) -> np.ndarray:
    """The image in ``{"pixels": [[...], ...]}``.

    :raises BadRequest: for anything but 8 rows of 8 numbers of 0..16.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body, {len(body)} bytes, is not JSON that can be read. {JSON_WANTED}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"The body is {_shown(value)}, not an object. {JSON_WANTED}")
    if "pixels" not in value:
        raise BadRequest(f'The object has no "pixels", its keys are {_shown(list(value))}. {JSON_WANTED}')
    _check_pixels(value["pixels"])
    return np.array(value["pixels"], dtype=np.float32)


def _check_pixels(rows: Any) -> None:
    _check_length("pixels", rows)
    for y, row in enumerate(rows):
        _check_length(f"pixels[{y}]", row)
        for x, pixel in enumerate(row):
            if not _is_pixel(pixel):
                raise BadRequest(f"pixels[{y}][{x}] is {_shown(pixel)}, not a number from 0 to {INK:g}. {JSON_WANTED}")


def _check_length(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise BadRequest(f"{name} is {_shown(value)}, not a list. {JSON_WANTED}")
    if len(value) != SIZE:
        raise BadRequest(f"{name} has {len(value)} entries, not {SIZE}. {JSON_WANTED}")


def _is_pixel(value: Any) -> bool:
    # True is an int in Python; NaN fails both comparisons.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= INK


def _shown(value: Any) -> str:
    """`value` as it came, in JSON, but short."""
    text = json.dumps(value) if isinstance(value, (str, float, bool, type(None))) else reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@app.errorhandler(RequestEntityTooLarge)
def too_large(_: RequestEntityTooLarge) -> tuple[dict[str, str], int]:
    """A body over the limit."""
    given = "" if request.content_length is None else f" of {request.content_length} bytes"
    return {"error": f"The body{given} is larger than the {LARGEST_BODY} bytes allowed. Send one image a request."}, 413


@app.errorhandler(HTTPException)
def as_json(error: HTTPException) -> Response:
    """Any other error, with the headers that belong to it, such as the Allow of a 405."""
    response = Response(json.dumps({"error": error.description}), error.code, mimetype="application/json")
    response.headers.extend((k, v) for k, v in error.get_headers() if k != "Content-Type")
    return response
