"""Which machine this process runs on."""

from __future__ import annotations

import ipaddress
import os
import socket


def this_machine() -> str:
    """What two processes have in common that can share memory.

    The kernel's boot and the network namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def is_loopback(host: str) -> bool:
    """Whether an address, or ``localhost``, is this machine's alone.

    Other names are not looked up.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_one_machine() -> bool:
    """Whether all ranks run on this machine, as far as the variables of their launcher say."""
    size = os.environ.get("WORLD_SIZE")
    if size is not None and os.environ.get("LOCAL_WORLD_SIZE") == size:
        return True
    return is_loopback(os.environ.get("MASTER_ADDR", "127.0.0.1"))
