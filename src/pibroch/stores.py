"""torch's TCPStore, in which processes meet.

It has no secret, and listens on all interfaces unless it is given a socket.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from pibroch.host import is_loopback

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it by name


_TIMEOUT = timedelta(seconds=300)


def tcp_store(
    host: str, port: int, *, is_host: bool = False, timeout: timedelta = _TIMEOUT
) -> TCPStore:
    """The store at an address; one opened at a loopback address listens there alone.

    Args:
        host: where it is.
        port: 0 for a free one.
        is_host: whether it is opened here, unless this process has opened it before.
        timeout: to reach it, and of its waits; five minutes when absent.

    Raises:
        RuntimeError: torch's, when it cannot be opened or reached.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in every build of torch

    listening = _listening(host, port) if is_host and is_loopback(host) else None
    descriptor = None
    if listening is not None:
        port = listening.getsockname()[1]
        descriptor = listening.detach()
    return TCPStore(
        host, port, None, is_host, timeout, False, multi_tenant=is_host, master_listen_fd=descriptor
    )


def _listening(host: str, port: int) -> socket.socket | None:
    """``None`` where this process has a store already, which is shared.

    Torch complains where it is another's.
    """
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
