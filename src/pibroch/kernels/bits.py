"""Bits of an integer in one instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic


def _lowest(typingctx: Any, mask: Any) -> Any:
    """Typing and code of :func:`lowest`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.int64(types.int64), generate


def _lowest_of(mask: int) -> int:
    """Stand-in when kernels run uncompiled (``NUMBA_DISABLE_JIT=1``)."""
    return (mask & -mask).bit_length() - 1 if mask else 64


lowest: Callable[..., int] = _lowest_of
"""``lowest(mask)``: the number of the lowest bit that is set in an int64, 64 when none is."""
if not config.DISABLE_JIT:  # type: ignore[attr-defined]
    lowest = intrinsic(_lowest)
