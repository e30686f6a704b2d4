"""How every CPU kernel is compiled.

One policy for all: sums may be reordered and fused (so that loops vectorise), NaN and infinity keep their meaning (so that a
diverged run is seen), the GIL is released (so that threads use cores) and machine code is cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

FASTMATH = {"contract", "reassoc", "nsz"}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on first use by the policy above."""
    compiled: Callable[..., Any] = njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")(function)
    return compiled
