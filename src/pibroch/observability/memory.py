"""Memory of this process."""

from __future__ import annotations

import ctypes
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
