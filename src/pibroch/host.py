"""Which machine this process runs on."""

from __future__ import annotations

import os
import socket


def this_machine() -> str:
    """What two processes have in common that can share memory: the kernel's boot and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
