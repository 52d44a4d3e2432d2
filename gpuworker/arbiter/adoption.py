"""Hands the stores of shared objects to the server after this one, and takes over those of the one before.

On USR2 gunicorn forks and executes itself. Between the two, in the child alone, it calls the hook ``pre_exec``, and
there the descriptors of the stores become inheritable and an environment variable names them: no other child of the
arbiter has either. A service manager keeps them over a restart, see :mod:`gpuworker.arbiter.manager`.

The new arbiter copies what it can use into stores of its own and closes the old ones, before it forks and before
gunicorn looks for listening sockets. So each server has its own stores and locks, neither waits for the other, and
whichever leaves takes along only what the other does not use.

What comes in from outside may be stale or broken: that costs a line in the log and a load, and nothing else.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from gpuworker.arbiter.manager import ServiceManager, StoreKey
from gpuworker.weights.store import Store, StoreError

#: Names the stores to the process that USR2 starts, and to no other.
VARIABLE = "GPUWORKER_UPGRADE"


class Inheritance:
    """What this arbiter has from the server before it."""

    def __init__(self, manager: ServiceManager) -> None:
        self._manager = manager
        self._stores: dict[StoreKey, Store] = {}
        self._notes: list[Callable[[Any], None]] = []

    def take(self, environ: MutableMapping[str, str]) -> None:
        """Copy what there is, once; what made it known disappears from `environ`. Never raises."""
        for find in (handed_over, self._manager.take_back):
            try:
                for key, fd in find(environ):
                    self._copy(key, fd)
            except Exception as error:
                self._refuse("what the last server left", error)

    def pop(self, key: StoreKey) -> Store:
        """The store of a device: with what was taken over, or a new one."""
        return self._stores.pop(key, None) or Store()

    def close(self, log: Any) -> None:
        """Let go of what belongs to devices that this server does not use, and tell what was taken."""
        while self._stores:
            self._stores.popitem()[1].close()
        while self._notes:
            self._notes.pop(0)(log)

    def _copy(self, key: StoreKey, fd: int) -> None:
        store = Store()
        try:
            names = [entry.name for entry in store.adopt(fd)]
            self._stores.setdefault(key, store)
        except (OSError, StoreError, ValueError) as error:
            store.close()
            self._refuse(f"the store of {key[0]} that the last server left", error)
        else:
            text = "The last server left on %s: %s"
            self._notes.append(lambda log: log.info(text, key[0], ", ".join(names) or "nothing that lasts"))
        finally:
            os.close(fd)

    def _refuse(self, what: str, error: Exception) -> None:
        self._notes.append(lambda log: log.warning("Cannot use %s: %s", what, error))


def handed_over(environ: MutableMapping[str, str]) -> list[tuple[StoreKey, int]]:
    """The descriptors that an arbiter has handed to this very process, which are the caller's to close.

    :raises ValueError: if the variable was meant for another process, or makes no sense.
    """
    text = environ.pop(VARIABLE, None)
    if text is None:
        return []
    try:
        told = json.loads(text)
        stores = [((str(device), int(index)), int(fd), int(inode)) for device, index, fd, inode in told["stores"]]
        meant = told["pid"] == os.getpid()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE} cannot be read: {error!r}") from error
    if not meant:
        raise ValueError(f"{VARIABLE} was meant for the process {told['pid']}")
    return [(key, fd) for key, fd, inode in stores if _is_socket(fd, inode)]


def _is_socket(fd: int, inode: int) -> bool:
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def hand_over(environ: MutableMapping[str, str], stores: Mapping[StoreKey, Store]) -> None:
    """Let the program that this process executes next take over `stores`; called in the child that USR2 forked.

    :param environ: that it will get.
    """
    told = [(*key, store.fd, os.fstat(store.fd).st_ino) for key, store in stores.items()]
    environ[VARIABLE] = json.dumps({"pid": os.getpid(), "stores": told})
    # gunicorn renews the rest of what a service manager says of sockets, and does not know this one.
    environ.pop("LISTEN_FDNAMES", None)
    for store in stores.values():
        os.set_inheritable(store.fd, True)


def follow(cfg: Any, stores: Mapping[StoreKey, Store], manager: ServiceManager) -> None:
    """Have gunicorn tell when it executes itself and when it ends; the operator's own hooks run, too.

    :param cfg: gunicorn's; a HUP makes a new one.
    """

    def pre_exec(server: Any) -> None:
        hand_over(server.cfg.env_orig, stores)

    def on_exit(server: Any) -> None:
        # A process that USR2 started may hold them without knowing what they are: one without this package.
        if not manager.keeps:
            for store in stores.values():
                store.clear()

    _call_first(cfg, "pre_exec", pre_exec)
    _call_first(cfg, "on_exit", on_exit)


def _call_first(cfg: Any, name: str, own: Callable[[Any], None]) -> None:
    theirs = getattr(cfg, name)

    def hook(server: Any) -> None:
        try:
            own(server)
        except Exception as error:
            server.log.error("gpuworker failed in %s", name, exc_info=error)
        theirs(server)

    cfg.set(name, hook)
