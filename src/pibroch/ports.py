"""Ports for processes that are about to be started on this machine."""

from __future__ import annotations

import random
import socket

# outgoing connections are given others: from 32768 on Linux, from 49152 elsewhere
_FROM = 16_000
_TO = 32_000


def free_port() -> int:
    """A free TCP port that stays free until a process that will listen on it has started.

    A port that the system picks (number 0) may be taken by any connection as soon as it was let go.
    """
    at_random = random.SystemRandom()  # whatever seeds a program has set
    while True:
        port = at_random.randrange(_FROM, _TO)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
