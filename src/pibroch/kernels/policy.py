"""How every CPU kernel is compiled.

One policy for all: sums may be reordered and fused (so that loops vectorise), NaN and infinity keep their meaning (so that a
diverged run is seen), the GIL is released (so that threads use cores) and machine code is cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

T = TypeVar("T")
FASTMATH = {"contract", "reassoc", "nsz"}


def kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Compile ``function`` on first use by the policy above."""
    compiled: Callable[..., T] = njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")(function)
    return compiled
