"""How every CPU kernel is compiled.

One policy for all: sums may be reordered and fused (so that loops vectorise), NaN and infinity keep
their meaning (so that a diverged run is seen), the GIL is released (so that threads use cores) and
machine code is cached on disk. Of processes that need the same kernel at once, one compiles it, and
the others wait and load what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from numba import njit
from numba.core.compiler_lock import global_compiler_lock

T = TypeVar("T")
FASTMATH = {"contract", "reassoc", "nsz"}
_KERNELS: list[Any] = []


def kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Compile ``function`` on first use by the policy above."""
    compiled: Callable[..., T] = njit(
        nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy"
    )(function)
    _KERNELS.append(compiled)
    _compile_once(compiled)
    return compiled


def _compile_once(kernel: Any) -> None:
    """Have one of the processes that share a cache compile a kernel, and the others load it."""
    cache: Any = getattr(kernel, "_cache", None)
    if not hasattr(cache, "_cache_file"):  # uncompiled, or of a numba that keeps it elsewhere
        return
    compile_or_load = kernel.compile

    def compile_alone(signature: Any) -> Any:
        # loaded here, as what calls kernels need know no clock
        from pibroch.kernels.compile_lock import locked

        with locked(cache._cache_file._index_path + ".lock", global_compiler_lock):
            return compile_or_load(signature)

    kernel.compile = compile_alone


def load_compiled() -> Iterator[None]:
    """Load what lies on disk for the kernels of all imported modules, one kernel a step.

    For a process that is to be forked. What is not there, or is of another version, is left to who
    calls the kernel.
    """
    for kernel in _KERNELS:
        cache = getattr(kernel, "_cache", None)
        # uncompiled, or of a numba that keeps it elsewhere
        if cache is None or not hasattr(cache, "_cache_file"):
            return
        # what cannot be read now is read, or made anew, when the kernel is called
        with suppress(Exception):
            codegen = kernel.targetctx.codegen()
            for key in cache._cache_file._load_index():
                if key not in kernel.overloads and key == cache._index_key(key[0], codegen):
                    kernel.compile(key[0])
                    yield
