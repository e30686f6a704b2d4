"""DLRM's dot interaction, forward and backward.

B samples, F embedded features, D their dim, P = (F + 1) F / 2 pairs. All arrays are contiguous.
"""

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Records
from pibroch.kernels.interaction import numba
from pibroch.kernels.operation import Operation

__all__ = ["backward", "forward"]

SAMPLES_PER_THREAD = 128  # below which a further thread is not worth waking


@Operation
def forward(bottom_BD: Records, embedded_BFD: Records, out: Records) -> None:
    """Write the bottom vector and the dot products of all pairs to ``out`` ``[B, D + P]``."""
    parallel.run(numba.forward, len(out), bottom_BD, embedded_BFD, out, grain=SAMPLES_PER_THREAD)


@Operation
def backward(
    bottom_BD: Records,
    embedded_BFD: Records,
    grad_out: Records,
    grad_bottom_BD: Records,
    grad_embedded_BFD: Records,
) -> None:
    """Write the gradients of both inputs, from that of the output ``[B, D + P]``."""
    parallel.run(
        numba.backward,
        len(grad_out),
        bottom_BD,
        embedded_BFD,
        grad_out,
        grad_bottom_BD,
        grad_embedded_BFD,
        grain=SAMPLES_PER_THREAD,
    )
