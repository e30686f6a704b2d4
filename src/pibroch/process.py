"""Settings of the whole process, which a program may choose and a library may not."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from contextlib import suppress

LAUNCHER = "PIBROCH_LAUNCHER"
"""The process that started this one as a rank."""
LAST_WORDS = "PIBROCH_LAST_WORDS"
"""A file for the reason of the first rank that ends because something was lost."""
RENDEZVOUS = "PIBROCH_RENDEZVOUS"
"""Where the processes of a job meet that a launcher started; rank 0 opens it."""
AHEAD_OF_TIME = 10
"""``nice`` of threads whose work nobody waits for yet: they take a core while others wait."""
# glibc's mallopt: parameter numbers from malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_TRIM_THRESHOLD_BYTES = 1 << 30
_OBJECTS_BETWEEN_COLLECTIONS = 50_000
# of OpenMP's threads before they sleep, some 30 ns each
_SPINS_ALONE = 10_000
_SPINS_BESIDE_OTHERS = 1_000


def num_processors() -> int:
    """Processors that this process may use; all of the machine where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_rank(local_ranks: int | None = None) -> int:
    """Threads of a rank, so that all ranks of this machine share its processors evenly.

    The number of ranks is ``LOCAL_WORLD_SIZE`` when not given.
    """
    return max(1, num_processors() // (local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def give_way(nice: int = AHEAD_OF_TIME) -> None:
    """Let the calling thread give way to others that want its core, as :func:`os.nice` counts.

    Where threads have no such numbers of their own, or the system forbids it, nothing changes.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + nice, 19))


def tune_process(is_alone: bool | None = None) -> None:
    """Tune OpenMP, malloc and Python's collector for training; call it before torch is imported.

    What the user gave OpenMP in the environment stays, and malloc where there is no glibc.

    *OpenMP*: torch's threads spin for milliseconds before they sleep, and other work on their cores
    waits as long; one that sleeps at once is woken fifty times a step. Alone they spin for 0.3 ms
    here, which took 4 to 5 % off a DLRM step of 40 ms on two idle cores against a tenth of it, and
    1 % off one with what is usual. Beside other ranks they spin for that tenth: with one of two
    cores busy the step took 80 ms, 104 with 0.3 ms and 116 with what is usual.

    *malloc*: activations would be given back to the kernel and faulted in again in each step: of a
    DLRM step with batch 2048 and dim 16, 1,600 page faults and 4 ms of 40; with batch 4096 and dim
    128, 26,900 faults and 31 ms of 134. None with this setting, and the same peak. The price: up to
    1 GiB of freed memory is kept, and all that lies below memory in use.

    *Python's collector of cycles* looks again and again at the million objects that imports make,
    0.6 s of the 3.3 s that a start takes; it does so after 50,000 new objects, not 700.

    Args:
        is_alone: whether no other process of the run computes on this machine; by default what
            ``LOCAL_WORLD_SIZE`` says.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        is_alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1" if is_alone is None else is_alone
        os.environ.setdefault(
            "GOMP_SPINCOUNT", str(_SPINS_ALONE if is_alone else _SPINS_BESIDE_OTHERS)
        )
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # a threshold would do, but glibc accepts none above 32 MiB
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
