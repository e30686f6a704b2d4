"""Memory of this process, and what is left for it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_STATUS = Path("/proc/self/status")
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of process groups of version 2 and 1: the limit, what is used, and the part of it that gives way.
"""


def rss_bytes() -> int:
    """Resident memory now; the peak where the system does not tell."""
    if sys.platform == "win32":
        return int(_windows_bytes().now)
    return _of_status("VmRSS") or _peak_of_usage()


def peak_rss_bytes() -> int:
    """The most resident memory so far.

    ``getrusage`` also counts what the process held before it began another program, so it is asked
    only where the system has no ``/proc``.
    """
    if sys.platform == "win32":
        return int(_windows_bytes().peak)
    # the kernel counts the peak a moment later
    return max(_of_status("VmHWM"), _of_status("VmRSS")) or _peak_of_usage()


def _of_status(name: str) -> int:
    """Bytes in a line of the process's status; 0 where there is none."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def _peak_of_usage() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes of this machine, or of this container, can still take.

    Args:
        proc: where the system says what is available; half of the memory is assumed where it says
            nothing.
        groups: where the limits of process groups are, of version 2 or 1.
    """
    lines = (proc / "meminfo").read_text().splitlines() if (proc / "meminfo").exists() else []
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    free = available[0] if available else half
    return min([free, *(left for group in _own_groups(proc, groups) for left in _left_in(group))])


def most_that_fits(proc: Path = Path("/proc")) -> int | None:
    """As :func:`free_memory`, with free swap; ``None`` where the system does not tell."""
    if not (proc / "meminfo").exists():
        return None
    lines = (proc / "meminfo").read_text().splitlines()
    swap = [int(line.split()[1]) << 10 for line in lines if line.startswith("SwapFree:")]
    return free_memory(proc) + sum(swap)


def _own_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """The groups that this process is in, as far as it sees them.

    In a container the outermost one is the container's.
    """
    yield groups
    cgroups = proc / "self" / "cgroup"
    for line in cgroups.read_text().splitlines() if cgroups.exists() else []:
        _, kinds, path = line.split(":", 2)
        inside = PurePosixPath(path.lstrip("/"))
        if kinds not in ("", "memory") or ".." in inside.parts:
            continue
        root = groups / kinds
        yield from (root / each for each in (inside, *inside.parents))


def _left_in(group: Path) -> Iterator[int]:
    """Bytes that a group may still take, where it has a limit.

    Cached files count as free, as they give way.
    """
    for limit, used, cached in _GROUP_FILES:
        if not ((group / limit).exists() and (group / used).exists()):
            continue
        text = (group / limit).read_text().strip()
        if text == "max":
            continue
        stat = group / "memory.stat"
        lines = stat.read_text().splitlines() if stat.exists() else []
        gives_way = sum(int(line.split()[1]) for line in lines if line.split()[:1] == [cached])
        yield max(0, int(text) - int((group / used).read_text()) + gives_way)


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
        working_set = _WorkingSet(ctypes.sizeof(_WorkingSet))
        kernel = ctypes.WinDLL("kernel32")
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.K32GetProcessMemoryInfo.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
        kernel.K32GetProcessMemoryInfo(
            kernel.GetCurrentProcess(), ctypes.byref(working_set), working_set.size
        )
        return working_set
