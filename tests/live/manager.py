"""Stands in for systemd: keeps a service's descriptors and starts it with them (sd_notify(3), sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.live.server import Server

# Started as a child that puts each descriptor where it belongs and becomes the service, as systemd does it.
_LAUNCH = """
import fcntl, os, sys
names, fds, command = sys.argv[1], [int(fd) for fd in sys.argv[2].split(",") if fd], sys.argv[3:]
copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in fds]
for place, copy in enumerate(copies, 3):
    os.dup2(copy, place)
os.closerange(3 + len(fds), 200)
if fds:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names)
os.execv(command[0], command)
"""


class Manager:
    """The manager of one service.

    :param sockets: what it listens at for the service, by name.
    """

    def __init__(self, tmp_path: Path, sockets: Mapping[str, socket.socket] | None = None) -> None:
        self._sockets = dict(sockets or {})
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(tmp_path / "notify"))
        self._notify.setblocking(False)
        self._stored: list[tuple[str, int]] = []
        self._command: list[str] = []
        self.messages: list[str] = []

    def close(self) -> None:
        self._notify.close()
        for _, fd in self._stored:
            os.close(fd)

    @property
    def env(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self._notify.getsockname()}

    @property
    def stored(self) -> list[str]:
        """The names of what it keeps."""
        self._receive()
        return sorted(name for name, _ in self._stored)

    def parked_fds(self) -> int:
        """Descriptors in the queues of what it keeps."""
        self._receive()
        infos = [Path(f"/proc/self/fdinfo/{fd}").read_text() for _, fd in self._stored]
        return sum(int(line.split()[1]) for info in infos for line in info.splitlines() if line.startswith("scm_fds"))

    def start(self, server: Server) -> Server:
        """Start the service with what there is for it."""
        self._receive()
        passed = [(name, sock.fileno()) for name, sock in self._sockets.items()] + self._stored
        self._command = self._command or server.command
        names, fds = ":".join(name for name, _ in passed), ",".join(str(fd) for _, fd in passed)
        server.command = [sys.executable, "-c", _LAUNCH, names, fds, *self._command]
        server.log_path.unlink(missing_ok=True)
        return server.start(pass_fds=[fd for _, fd in passed])

    def _receive(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._notify, 4096, 8)
            except BlockingIOError:
                return
            self.messages.append(data.decode())
            self._handle(dict(line.split("=", 1) for line in data.decode().splitlines()), fds)

    def _handle(self, message: Mapping[str, str], fds: Sequence[int]) -> None:
        if "FDSTOREREMOVE" in message:
            for name, fd in [kept for kept in self._stored if kept[0] == message["FDNAME"]]:
                self._stored.remove((name, fd))
                os.close(fd)
        elif "FDSTORE" in message:
            assert message["FDPOLL"] == "0", "systemd would drop it when the service is gone"
            self._stored += [(message["FDNAME"], fd) for fd in fds]
        else:
            assert not fds
