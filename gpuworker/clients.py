"""Whether anybody still waits for an answer."""

from __future__ import annotations

import select
from typing import Any


def has_gone(sock: Any) -> bool:
    """Whether the client has closed its side of the connection.

    It may have asked, waited in the listen queue until its own time was up, and left. As for nginx (499), one that
    closes only its sending side counts as gone: the kernel cannot tell the two apart.

    :param sock: of the connection; None if the server does not give it.
    """
    if sock is None:
        return False
    poll = select.poll()
    try:
        poll.register(sock, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True  # closed on this side already
