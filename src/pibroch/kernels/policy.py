"""How every CPU kernel is compiled.

One policy for all: sums may be reordered and fused (so that loops vectorise), NaN and infinity keep their meaning (so that a
diverged run is seen), the GIL is released (so that threads use cores) and machine code is cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from numba import njit

T = TypeVar("T")
FASTMATH = {"contract", "reassoc", "nsz"}
_KERNELS: list[Any] = []


def kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Compile ``function`` on first use by the policy above."""
    compiled: Callable[..., T] = njit(
        nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy"
    )(function)
    _KERNELS.append(compiled)
    return compiled


def load_compiled() -> Iterator[None]:
    """Load the machine code that lies on disk for the kernels of all imported modules, one kernel from step to step.

    For a process that is to be forked. What is not there, or is of another version, is left to who calls the kernel.
    """
    for kernel in _KERNELS:
        cache = getattr(kernel, "_cache", None)
        if cache is None or not hasattr(
            cache, "_cache_file"
        ):  # uncompiled, or not numba's as it was
            return
        with suppress(
            Exception
        ):  # what cannot be read now is read, or made anew, when the kernel is called
            codegen = kernel.targetctx.codegen()
            for key in cache._cache_file._load_index():
                if key not in kernel.overloads and key == cache._index_key(key[0], codegen):
                    kernel.compile(key[0])
                    yield
