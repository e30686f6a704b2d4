"""Memory of this process, and what is left for it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def rss_bytes() -> int:
    """Resident memory now; the peak where the system does not tell."""
    if sys.platform == "win32":
        return int(_windows_bytes().now)
    if not _STATM.exists():
        return peak_rss_bytes()
    import resource

    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """The most resident memory so far."""
    if sys.platform == "win32":
        return int(_windows_bytes().peak)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes of this machine can still take, or of this container where it has a limit of its own.

    Args:
        proc: where the system says what is available; half of the memory is assumed where it says nothing.
        groups: where the limits of process groups are (version 2).
    """
    lines = (proc / "meminfo").read_text().splitlines() if (proc / "meminfo").exists() else []
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    free = available[0] if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = groups / "memory.max", groups / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free


class _WorkingSet(ctypes.Structure):
    """Windows's ``PROCESS_MEMORY_COUNTERS``."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        ("peak", ctypes.c_size_t),
        ("now", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 6),
    )


if sys.platform == "win32":

    def _windows_bytes() -> _WorkingSet:
        found, kernel = _WorkingSet(ctypes.sizeof(_WorkingSet)), ctypes.WinDLL("kernel32")
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.K32GetProcessMemoryInfo.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
        kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(found), found.size)
        return found
