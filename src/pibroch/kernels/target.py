"""What kernels are compiled for.

It decides the last bits of their sums, which compilers reorder and fuse by the width of the vectors
that suit the processor (:mod:`pibroch.kernels.policy`).
"""

from __future__ import annotations

from numba.core.registry import cpu_target

_VECTORS = {"avx", "avx2", "avx512f", "avx512vl", "fma", "neon", "sse4.2", "sve", "sve2"}
"""Instructions that sum floats."""


def compile_target() -> str:
    """The processor's name and its vector instructions, such as ``znver4 avx avx2 fma sse4.2``.

    ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` count in place of what the host has.
    """
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    present = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    return " ".join([name, *sorted(present & _VECTORS)])
