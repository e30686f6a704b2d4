"""How every CPU kernel is compiled.

One policy for all: sums may be reordered and fused (so that loops vectorise), NaN and infinity keep
their meaning (so that a diverged run is seen), the GIL is released (so that threads use cores) and
machine code is cached on disk. Of processes that need the same kernel at once, one compiles it, and
the others wait and load what it wrote.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from numba import njit
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError

logger = logging.getLogger(__name__)
T = TypeVar("T")
FASTMATH = {"contract", "reassoc", "nsz"}
UNREADABLE = (
    OSError,  # a file that is gone, or another user's
    NumbaError,  # a signature of another version of the kernel
    RuntimeError,  # machine code that LLVM does not parse
    # the files are pickles: cut off or damaged they ask for whatever their bytes happen to say
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What reading the files of numba's cache may raise; a failed assertion is none of these."""
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
        for signature in _signatures_on_disk(kernel, cache):
            try:
                kernel.compile(signature)
            except UNREADABLE as error:
                _leave_to_caller(kernel, error)
                break
            yield  # not within `try`: whoever is forked here may raise what it likes


def _signatures_on_disk(kernel: Any, cache: Any) -> list[Any]:
    """Those for this machine and version of the kernel that are not loaded yet."""
    try:
        codegen = kernel.targetctx.codegen()
        keys = list(cache._cache_file._load_index())
        return [
            key[0]
            for key in keys
            if key[0] not in kernel.overloads and key == cache._index_key(key[0], codegen)
        ]
    except UNREADABLE as error:
        _leave_to_caller(kernel, error)
        return []


def _leave_to_caller(kernel: Any, error: Exception) -> None:
    """Whoever calls the kernel reads its files again, and says what is wrong or compiles."""
    logger.debug("%s is not loaded for processes to come: %r", kernel.__name__, error)
