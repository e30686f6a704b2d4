"""What processes used of the machine during a measurement, from ``/proc`` (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NOISY_SHARE = 0.05


class ForeignLoad:
    """Share of all cores that other processes kept busy since it was made.

    Others are all but this process and its workers.

    Workers must still run, or have been waited for, when ``share`` is read: both are counted.
    """

    def __init__(self) -> None:
        self._workers: set[int] = set()
        self._start_total, self._start_busy = _machine_ticks()
        self._start_ours = self._our_ticks()

    def add_worker(self, pid: int) -> None:
        """Count a running worker as ours; to be called soon after its start."""
        self._workers.add(pid)

    def share(self) -> float:
        """From 0 to 1."""
        total, busy = _machine_ticks()
        ours = self._our_ticks() - self._start_ours
        elapsed = max(1, total - self._start_total)
        return min(1.0, max(0.0, (busy - self._start_busy - ours) / elapsed))

    def _our_ticks(self) -> float:
        own = os.times()
        seconds = own.user + own.system + own.children_user + own.children_system
        return seconds * CLOCK_TICKS_PER_S + sum(_ticks(pid) for pid in self._workers)


def _machine_ticks() -> tuple[int, int]:
    """All and busy ticks of all cores; what the hypervisor stole counts as busy."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    busy = user + nice + system + irq + softirq + steal
    return busy + idle + iowait, busy


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of processes so far, in steps of a clock tick (10 ms); of those gone nothing."""
    return sum(map(_ticks, pids)) / CLOCK_TICKS_PER_S


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return int(fields[11]) + int(fields[12])
