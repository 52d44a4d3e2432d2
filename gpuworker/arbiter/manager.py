"""The service manager: systemd's protocol to keep a service's descriptors over its restart (``sd_notify(3)``, FDSTORE).

What is kept is the reading end of each store, handed over once. What workers publish later goes into the same socket,
so the manager always has the newest content and hears nothing of it.

After a restart the descriptors come back among those of socket activation (``sd_listen_fds(3)``), which gunicorn takes
for sockets to listen at, all of them. So they are taken out before it looks.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from gpuworker.weights.store import Store

#: A device, and its number where several have one name.
StoreKey = tuple[str, int]

_FIRST_FD = 3  # SD_LISTEN_FDS_START
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_NAME = re.compile(r"gpuworker-(\d+)-(.+)")
# Seconds for the manager to take a message; it does nothing else, so this is long.
_PATIENCE = 5.0


def name_of(key: StoreKey) -> str:
    """What the manager calls the store of a device."""
    return f"gpuworker-{key[1]}-{key[0]}"


class ServiceManager:
    """What the manager of this service has of ours.

    :ivar keeps: whether it has this arbiter's stores.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._names: set[str] = set()
        self._left: set[str] = set()  # by the arbiter before

    def take_back(self, environ: MutableMapping[str, str]) -> list[tuple[StoreKey, int]]:
        """The stores that the manager passed to this process, which are the caller's to close.

        Other descriptors are moved to where gunicorn looks for them, and `environ` tells of those only.

        :raises ValueError: if `environ` makes no sense.
        """
        if environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        passed = range(_FIRST_FD, _FIRST_FD + int(environ.get("LISTEN_FDS", 0)))
        names = environ.get("LISTEN_FDNAMES", "").split(":")[: len(passed)]
        found = {fd: match for fd, name in zip(passed, names, strict=False) if (match := _NAME.fullmatch(name))}
        if not found:
            return []
        self._left = {match[0] for match in found.values()}
        own = [((match[2], int(match[1])), _moved_away(fd, passed.stop)) for fd, match in found.items()]
        others = [fd for fd in passed if fd not in found]
        for place, fd in enumerate(others, _FIRST_FD):
            if fd != place:
                os.dup2(fd, place)
        os.closerange(_FIRST_FD + len(others), passed.stop)
        _tell(environ, [names[fd - _FIRST_FD] for fd in others if fd - _FIRST_FD < len(names)], len(others))
        return own

    def keep(self, stores: Mapping[StoreKey, Store], environ: Mapping[str, str], log: Any) -> None:
        """Have the manager keep `stores` and nothing else of ours. What it has already is not sent again."""
        wanted = {name_of(key): store.fd for key, store in stores.items()}
        new, gone = wanted.keys() - self._names, (self._names | self._left) - wanted.keys()
        if not (new or gone):
            return
        self._names, self._left = set(wanted), set()
        try:
            # A name may stand for the store of the arbiter before, and would stand for both.
            for name in sorted(gone | new):
                _send(environ, f"FDSTOREREMOVE=1\nFDNAME={name}")
            for name in sorted(new):
                # FDPOLL=0: when this process is gone the other end is closed, which is no reason to let go.
                _send(environ, f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [wanted[name]])
        except (OSError, ValueError) as error:
            self.keeps = False
            log.error("No service manager keeps the shared objects over a restart: %s", error)
        else:
            self.keeps = bool(wanted)


def _moved_away(fd: int, lowest: int) -> int:
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return copy


def _tell(environ: MutableMapping[str, str], names: Sequence[str], count: int) -> None:
    """Describe the descriptors that are left, for gunicorn."""
    environ["LISTEN_FDS"], environ["LISTEN_FDNAMES"] = str(count), ":".join(names)
    if not count:
        for variable in _VARIABLES:
            del environ[variable]


def _send(environ: Mapping[str, str], message: str, fds: Sequence[int] = ()) -> None:
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        raise OSError("none has started this server (NOTIFY_SOCKET is not set)" if not address else f"at {address!r}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(_PATIENCE)
        sender.connect("\0" + address[1:] if address.startswith("@") else address)
        socket.send_fds(sender, [message.encode()], list(fds))
