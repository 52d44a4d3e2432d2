"""The operator's settings: ``GPUWORKER_*`` environment variables, checked once and frozen.

They come from the shell or from ``raw_env`` in ``gunicorn.conf.py``; gunicorn has put the latter into the environment
by the time they are read here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "GPUWORKER_"


class SettingError(ValueError):
    """A setting has a value that cannot be used. The message says what was given, what is allowed and what to do."""


@dataclass(frozen=True)
class Settings:
    """What the operator asked for.

    :param devices: ``auto`` or a comma separated list, see :mod:`gpuworker.arbiter.devices`.
    :param load_timeout: seconds that importing the app and loading its model may take.
    :param fdstore: whether the service manager keeps the shared objects over a restart of the service.
    :param threads: intra-op threads of torch in one worker, or None for a fair share of the machine.
    :param reload: ``rolling``: the old workers serve until the new ones are ready. ``recreate``: where new weights have
        to be loaded, the old workers leave first.
    """

    devices: str = "auto"
    fdstore: bool = False
    load_timeout: float = 600.0
    threads: int | None = None
    reload: str = "rolling"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and check every ``GPUWORKER_*`` variable of `environ`.

        :raises SettingError: for a value out of range, and for a name that looks like a misspelt setting.
        """
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if name in _READERS:
                field, read = _READERS[name]
                values[field] = read(name, text.strip())
            elif name.startswith(PREFIX):
                _check_spelling(name)
        return cls(**values)


def _check_spelling(name: str) -> None:
    # Only what is close to a setting is refused: Kubernetes puts GPUWORKER_PORT and the like into the environment of
    # every pod beside a service called "gpuworker".
    known = [setting.removeprefix(PREFIX) for setting in _READERS]
    for close in difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.8):
        raise SettingError(f"there is no setting {name}: did you mean {PREFIX}{close}?")


def _text(name: str, text: str) -> str:
    if not text:
        raise SettingError(f"{name} is empty: unset it, or use auto, indices, GPU-… or MIG-… names, or cpu.")
    return text


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # `not 0 < value`: also true for NaN. More than a year is a mistake, and more than some clocks take.
    if not 0 < value <= 366 * 24 * 3600:
        raise SettingError(f"{name}={text!r} is not a number of seconds above 0 and up to a year, such as 600.")
    return value


def _switch(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise SettingError(f"{name}={text!r} is neither on nor off.")
    return text == "on"


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) >= 1):
        raise SettingError(f"{name}={text!r} is not a whole number from 1 to 9999.")
    return int(text)


def _reload(name: str, text: str) -> str:
    if text not in ("rolling", "recreate"):
        raise SettingError(f"{name}={text!r} is neither rolling nor recreate.")
    return text


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "GPUWORKER_DEVICES": ("devices", _text),
    "GPUWORKER_FDSTORE": ("fdstore", _switch),
    "GPUWORKER_LOAD_TIMEOUT": ("load_timeout", _seconds),
    "GPUWORKER_RELOAD": ("reload", _reload),
    "GPUWORKER_THREADS": ("threads", _count),
}
