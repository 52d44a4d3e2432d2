"""The fd store (systemd's term): file descriptors parked in the kernel, so that they outlive whoever made them.

A process that dies takes its memory along, unless somebody else holds a descriptor of it, and a server that does
nothing but hold descriptors is one more process that can die. A message queued in a socket holds descriptors too, and
the queue lives as long as any process has the socket. So the newest message in a socketpair *is* the content: an index
and, by SCM_RIGHTS, all descriptors. Nobody receives it; readers peek, which gives them their own copies and leaves it.

To change the content, a writer sends the whole of the new message and then drops the one before it. Both steps are one
system call each. A writer that dies before the first changed nothing; one that dies between the two leaves the old
message in front, which is still right to read, and the new one behind, which the next writer makes the only one.

The kernel frees what is parked when the last process that has the socket is gone: the arbiter, its workers and whatever
they forked without exec.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import socket
import struct
import termios
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice

_MAX_FDS = 253  # SCM_MAX_FD of the kernel: descriptors in one message
_FD_ROOM = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
# Asked for, not taken as given: net.core.wmem_default differs between machines. The kernel grants twice the value.
_BUFFER = 212992

#: The generation of what the workers of another arbiter have loaded: older than all of this one.
ADOPTED = 0


class StoreError(RuntimeError):
    """A limit of the kernel was met; the text says which one and what to do. The content is what it was before."""


@dataclass(frozen=True)
class Entry:
    """What the index says of one object.

    :ivar name: of the object.
    :ivar key: hex digest; the same key means the same object.
    :ivar generation: the newest generation that uses it.
    :ivar sizes: numbers that the owner wants to know without opening the descriptors, such as their sizes in bytes.
    :ivar lasting: whether the workers of another arbiter may use it, too; the key must say all that it is made of.
    """

    name: str
    key: str
    generation: int
    sizes: tuple[int, ...]
    lasting: bool = False


_Parked = tuple[Entry, list[int]]


class Store:
    """The objects of one device. Made in the arbiter, used in the workers forked from it.

    `find` and `entries` need no lock and see a complete content, the old or the new one. `publish` and `update` must be
    called under an exclusive lock, the same in all processes and threads.
    """

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        # Whoever holds this end alone can read the content, and no more: all that another server needs.
        self.fd = self._receiver.fileno()
        self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        # The old message has to leave room for the new one, and the kernel charges up to twice the bytes of a message.
        self._max_bytes = self._sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4

    def find(self, key: str) -> tuple[Entry, list[int]] | None:
        """The entry of `key` and copies of its descriptors, close-on-exec and the caller's to close; None without one.

        For an instant the process has copies of all descriptors in the store.

        :raises StoreError: when RLIMIT_NOFILE leaves no room for them.
        """
        with _peek(self._receiver, self._max_bytes) as content:
            for position, (entry, _) in enumerate(content):
                if entry.key == key:
                    return content.pop(position)
        return None

    def entries(self) -> list[Entry]:
        """The index. No descriptor is opened."""
        try:
            data = self._receiver.recv(self._max_bytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        return [entry for entry, _ in _parse(data)]

    def publish(self, entry: Entry, fds: Sequence[int]) -> None:
        """Park copies of `fds` under `entry`, in place of what has the same key. The caller keeps and closes its own.

        The caller holds the store's lock.

        :raises StoreError: when a limit of the kernel is met: descriptors or bytes in a message, RLIMIT_NOFILE.
        :raises OSError: when one of `fds` is not an open descriptor.
        """
        self._keep_newest()
        with _peek(self._receiver, self._max_bytes) as content:
            others = [parked for parked in content if parked[0].key != entry.key]
            self._replace([*others, (entry, list(fds))])

    def update(self, change: Callable[[Entry], Entry | None]) -> None:
        """Put what `change` returns in the place of each entry; None drops it. Descriptors stay with their entry.

        The caller holds the store's lock. `change` may change anything but the key; if it raises, nothing changes.

        :raises StoreError: as `publish`.
        """
        self._keep_newest()
        with _peek(self._receiver, self._max_bytes) as content:
            changed = [(new, fds) for entry, fds in content if (new := change(entry)) is not None]
            if changed != content:
                self._replace(changed)

    def adopt(self, fd: int) -> list[Entry]:
        """Take over the lasting entries of the store of which another arbiter handed over the :attr:`fd`.

        Nobody else may use this store yet; that one may be in use. The caller closes `fd`.

        :returns: what was taken.
        :raises OSError: if `fd` is not the socket of a store.
        :raises ValueError: if its content is not that of a store of this version.
        :raises StoreError: as `publish`.
        """
        with socket.socket(fileno=os.dup(fd)) as other, _peek(other, self._max_bytes) as content:
            taken = [(replace(entry, generation=ADOPTED), fds) for entry, fds in content if entry.lasting]
            if taken:
                self._replace(taken)
        return [entry for entry, _ in taken]

    def clear(self) -> None:
        """Drop everything. Nobody may use the store any more."""
        with suppress(BlockingIOError):
            while True:
                self._receiver.recv(1)

    def close(self) -> None:
        """Close this process's ends. The content stays while another process has them."""
        self._sender.close()
        self._receiver.close()

    def _replace(self, content: Sequence[_Parked]) -> None:
        self._send(content)
        self._keep_newest()

    def _send(self, content: Sequence[_Parked]) -> None:
        data = json.dumps([asdict(entry) | {"fds": len(fds)} for entry, fds in content]).encode()
        fds = array("i", [fd for _, own in content for fd in own])
        if len(fds) > _MAX_FDS:
            raise StoreError(
                f"the kernel parks at most {_MAX_FDS} descriptors for a device, and {len(fds)} are needed. Share fewer "
                f"objects, each with more in it"
            )
        if len(data) > self._max_bytes:
            raise StoreError(
                f"the index of the shared objects has {len(data)} bytes, and {self._max_bytes} fit. Share fewer "
                f"objects, or give them shorter names"
            )
        try:
            self._sender.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
        except OSError as error:
            raise _explained(error) from error

    def _keep_newest(self) -> None:
        """Drop all messages but the last: after a send the old one, and what a writer left that died before that."""
        while self._queued_bytes() > self._front_bytes():
            # Without room for descriptors none is opened. Not recv(0), which CPython answers without asking the kernel.
            self._receiver.recv(1)

    def _queued_bytes(self) -> int:
        """Of all messages together: what FIONREAD tells of a SOCK_SEQPACKET socket."""
        queued: int
        (queued,) = struct.unpack("i", fcntl.ioctl(self._receiver, termios.FIONREAD, bytes(struct.calcsize("i"))))
        return queued

    def _front_bytes(self) -> int:
        flags = socket.MSG_PEEK | socket.MSG_TRUNC | socket.MSG_DONTWAIT  # MSG_TRUNC: the length, whatever the room
        try:
            return self._receiver.recv_into(bytearray(1), 1, flags)
        except BlockingIOError:
            return 0


@contextmanager
def _peek(receiver: socket.socket, room: int) -> Iterator[list[_Parked]]:
    """The content with copies of all descriptors; those still in the list at the end are closed."""
    data, fds = _receive_copies(receiver, room)
    unclaimed = iter(fds)
    content: list[_Parked] = []
    try:
        content.extend((entry, list(islice(unclaimed, count))) for entry, count in _parse(data))
        yield content
    finally:
        for _, left in content:
            _close_all(left)
        _close_all(list(unclaimed))


def _receive_copies(receiver: socket.socket, room: int) -> tuple[bytes, list[int]]:
    # Not socket.recv_fds: it ignores its flags, and would take the message away.
    flags = socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    try:
        data, ancillary, happened, _ = receiver.recvmsg(room, _FD_ROOM, flags)
    except BlockingIOError:
        return b"[]", []
    fds = array("i", b"".join(raw for _, _, raw in ancillary)).tolist()
    if happened & socket.MSG_CTRUNC:
        _close_all(fds)
        raise StoreError(
            f"this process may not open the descriptors of the shared objects: its limit RLIMIT_NOFILE is "
            f"{_open_files_limit()}. Raise it (ulimit -n, LimitNOFILE= of systemd)"
        )
    return data or b"[]", fds  # b"": the store was empty, and its other end has gone with the server


def _parse(data: bytes) -> Iterator[tuple[Entry, int]]:
    """The entries of an index, each with its number of descriptors.

    :raises ValueError: for what another version has written.
    """
    try:
        for item in json.loads(data):
            count = item.pop("fds")
            yield Entry(**item | {"sizes": tuple(item["sizes"])}), count
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not the index of a store: {error!r}") from error


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _explained(error: OSError) -> OSError | StoreError:
    if error.errno == errno.ETOOMANYREFS:
        return StoreError(
            f"the processes of this user have more descriptors parked in sockets than RLIMIT_NOFILE allows, which is "
            f"{_open_files_limit()}. Raise it for the whole server (ulimit -n, LimitNOFILE= of systemd)"
        )
    if error.errno in (errno.EAGAIN, errno.EMSGSIZE):
        return StoreError(
            f"the index of the shared objects does not fit into the buffer of its socket ({error.strerror}). Raise the "
            f"sysctl net.core.wmem_max to {_BUFFER} or more"
        )
    return error
