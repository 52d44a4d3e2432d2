"""What a request can do to the device of its worker: break the CUDA context, or use up the memory.

A broken context (a device-side assert, an illegal access, a write to shared weights, an ECC error) is for ever: the
worker answers that request with an error, takes no other, and leaves; the one that replaces it attaches to the weights.
Out of memory is not for ever: the client is asked to try again, and what the request held is given back.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from werkzeug.exceptions import ServiceUnavailable

from gpuworker import clients

#: Seconds after which a client may try again.
RETRY_AFTER = 1
#: A worker leaves when so many requests in a row ran out of memory and left more in use than there was at the start.
UNRECOVERED_LIMIT = 3
#: What may be left in use, as a factor and in bytes.
LEFT_FACTOR, LEFT_BYTES = 1.05, 32 << 20

_READ_ONLY_HINT = (
    " If the model writes to a parameter or a large buffer: shared weights are read-only. Name what it writes to in "
    "share(private=…), or share it with mutable=True."
)
_HINTED = ("illegal memory access", "invalid argument")

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Health(Protocol):
    """What is asked of a device between requests."""

    def problem(self) -> str:
        """Why nothing can run on the device any more, in this process; empty if it can. Costs about a microsecond."""

    def ooms(self) -> int:
        """How many allocations have failed so far."""

    def own_bytes(self) -> int:
        """Bytes that this process's tensors use, besides shared ones."""

    def give_back(self) -> None:
        """Free what only the allocator keeps."""


class CpuHealth:
    """A CPU device has neither."""

    def problem(self) -> str:
        """See :class:`Health`."""
        return ""

    def ooms(self) -> int:
        """See :class:`Health`."""
        return 0

    def own_bytes(self) -> int:
        """See :class:`Health`."""
        return 0

    def give_back(self) -> None:
        """See :class:`Health`."""


class CudaHealth:
    """A GPU on which CUDA has started."""

    def __init__(self) -> None:
        # Kept, since to ask for the current stream costs nine microseconds each time.
        self._stream = torch.cuda.current_stream()

    def problem(self) -> str:
        """See :class:`Health`. A query of a stream raises what has broken the context, and does not wait."""
        try:
            self._stream.query()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    def ooms(self) -> int:
        """See :class:`Health`."""
        return int(torch.cuda.memory_stats().get("num_ooms", 0))

    def own_bytes(self) -> int:
        """See :class:`Health`."""
        return int(torch.cuda.memory_allocated())

    def give_back(self) -> None:
        """See :class:`Health`."""
        torch.cuda.empty_cache()


class Watch:
    """The app, watched: a WSGI application around another.

    :param retire: called when this worker must take no more requests.
    """

    def __init__(self, app: WsgiApp, health: Health, log: Any, slot: int, retire: Callable[[], None]) -> None:
        self._app = app
        self._health = health
        self._log = log
        self._slot = slot
        self._retire = retire
        self._retired = False
        self._recovering = threading.Lock()
        self._ooms = health.ooms()
        self._own_bytes = health.own_bytes()
        self._unrecovered = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """See PEP 3333."""
        if self._retired:
            return _unavailable(environ, start_response)
        if clients.has_gone(environ.get("gunicorn.socket")):
            start_response("499 Client Closed Request", [("Content-Length", "0")])
            return []
        start = _Start(start_response)
        out_of_memory = False
        try:
            body = self._app(environ, start)
        except Exception as error:
            if self._is_broken(environ) or not _is_oom(error):
                raise
            self._log.warning("Slot %d ran out of memory over %s: %s", self._slot, _request(environ), error)
            out_of_memory = True
        # Not in the block above, where the error still holds what the request had.
        if out_of_memory:
            self._recover()
            return _unavailable(environ, start_response)
        if self._is_broken(environ):
            _close(body)
            return _unavailable(environ, start_response)
        if start.status.startswith("5"):
            self._recover()
        start.release()
        if isinstance(body, (list, tuple, environ.get("wsgi.file_wrapper", tuple))):
            return body
        return _Body(body, lambda: self._is_broken(environ))

    def _is_broken(self, environ: dict[str, Any]) -> bool:
        """Whether the context is lost; the first time it is, the worker retires."""
        problem = self._health.problem()
        if problem and not self._retired:
            self._retired = True
            hint = _READ_ONLY_HINT if any(sign in problem for sign in _HINTED) else ""
            message = "Slot %d has lost its device over %s: %s. The worker leaves, another takes its place.%s"
            self._log.error(message, self._slot, _request(environ), problem, hint)
            self._retire()
        return bool(problem)

    def _recover(self) -> None:
        """After an error: if memory was the reason, give back what the request held."""
        with self._recovering:
            ooms = self._health.ooms()
            if ooms == self._ooms:
                return
            self._ooms = ooms
            gc.collect()  # a traceback in a cycle holds the tensors of its frames
            self._health.give_back()
            left = self._health.own_bytes()
            if left <= self._own_bytes * LEFT_FACTOR + LEFT_BYTES:
                self._unrecovered = 0
                return
            self._unrecovered += 1
            if self._unrecovered >= UNRECOVERED_LIMIT and not self._retired:
                self._retired = True
                message = "Slot %d ran out of memory %d times and still holds %.2f GiB: the worker leaves"
                self._log.error(message, self._slot, self._unrecovered, left / 2**30)
                self._retire()


class _Start:
    """The server's ``start_response``, held back until it is known whether the answer is one."""

    def __init__(self, start_response: Callable[..., Any]) -> None:
        self.status = ""
        self._start_response = start_response
        self._held: tuple[Any, ...] | None = None
        self._released = False

    def __call__(self, status: str, *args: Any) -> Any:
        self.status = status
        if self._released:
            return self._start_response(status, *args)
        self._held = (status, *args)
        return self._write

    def release(self) -> Any:
        """Pass on what the app has said, and from now on what it says."""
        self._released = True
        held, self._held = self._held, None
        return self._start_response(*held) if held else None

    def _write(self, data: bytes) -> None:
        """The old way to send a body (PEP 3333), which cannot wait."""
        if self._held:
            self._server_writes = self.release()
        self._server_writes(data)


class _Body:
    """A response that is still being made while it is sent: the device is looked at when it is over."""

    def __init__(self, body: Iterable[bytes], at_end: Callable[[], object]) -> None:
        self._body = body
        self._at_end = at_end

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        """Called by the server, whatever happened."""
        try:
            _close(self._body)
        finally:
            self._at_end()


def out_of_memory(error: BaseException) -> ServiceUnavailable:
    """An error handler for Flask, which without one answers 500 to a request that the GPU has no memory for::

        app.register_error_handler(torch.cuda.OutOfMemoryError, gpuworker.out_of_memory)

    :returns: 503 with ``Retry-After``.
    """
    return ServiceUnavailable(retry_after=RETRY_AFTER)


def _unavailable(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    return ServiceUnavailable(retry_after=RETRY_AFTER)(environ, start_response)


def _is_oom(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _request(environ: dict[str, Any]) -> str:
    return f"{environ.get('REQUEST_METHOD')} {environ.get('PATH_INFO')}"


def _close(body: Any) -> None:
    close = getattr(body, "close", None)
    if close:
        close()
