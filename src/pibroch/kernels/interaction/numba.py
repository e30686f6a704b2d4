"""The DLRM dot interaction for CPUs.

Small matrix products, all scratch of a sample in the first-level cache.

Nothing is allocated per sample, and a sample's result does not depend on which range it is part of.
Columns are counted by unsigned numbers: for signed ones numba adds a test for negative indices,
which keeps loops from becoming vector code.

Shape legend: B samples, F features, D embedding width, M = F + 1 vectors of a sample, P = M (M - 1)
/ 2 pairs.
"""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Records
from pibroch.kernels.interaction.tile import LANES, ROWS, multiply_tile, transpose_tile
from pibroch.kernels.policy import kernel


@kernel
def _padded(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


@kernel
def forward(bottom_BD: Records, embedded_BFD: Records, out: Records, start: int, stop: int) -> None:
    """Fill ``out[start:stop]``, float32 ``[B, D + P]``, as `naive.forward` does.

    All arrays are contiguous.
    """
    num_features = embedded_BFD.shape[1]
    dim = embedded_BFD.shape[2]
    num_vectors = num_features + 1
    depth = _padded(dim, LANES)
    height = _padded(num_vectors, ROWS)
    width = _padded(num_vectors, LANES)
    vectors_MD = np.zeros((height, depth), np.float32)
    vectors_DM = np.zeros((depth, width), np.float32)
    dots_MM = np.zeros((height, width), np.float32)
    for b in range(start, stop):
        for d in range(dim):
            out[b, d] = vectors_MD[0, d] = bottom_BD[b, d]
        for f in range(num_features):
            for d in range(dim):
                vectors_MD[f + 1, d] = embedded_BFD[b, f, d]
        for i in range(0, height, ROWS):
            for d in range(0, depth, LANES):
                transpose_tile(vectors_DM, vectors_MD, i, d)
        for i in range(0, height, ROWS):
            for j in range(0, i + ROWS - 1, LANES):
                multiply_tile(dots_MM, i, j, vectors_MD, vectors_DM, dim)
        pair = np.uint64(dim)
        for i in range(1, num_vectors):
            for j in range(np.uint64(i)):
                out[b, pair + j] = dots_MM[i, j]
            pair += np.uint64(i)


@kernel
def backward(
    bottom_BD: Records,
    embedded_BFD: Records,
    grad_out: Records,
    grad_bottom_BD: Records,
    grad_embedded_BFD: Records,
    start: int,
    stop: int,
) -> None:
    """Fill both gradients for the samples ``start`` to ``stop`` as `naive.backward` does."""
    num_features = embedded_BFD.shape[1]
    dim = embedded_BFD.shape[2]
    num_vectors = num_features + 1
    depth = _padded(dim, LANES)
    height = _padded(num_vectors, ROWS)
    width = _padded(num_vectors, LANES)
    vectors_MD = np.zeros((height, depth), np.float32)
    lower_MM = np.zeros((height, width), np.float32)  # its diagonal and upper triangle stay zero
    symmetric_MM = np.zeros((width, width), np.float32)
    grads_MD = np.zeros((height, depth), np.float32)
    for b in range(start, stop):
        for d in range(dim):
            vectors_MD[0, d] = bottom_BD[b, d]
        for f in range(num_features):
            for d in range(dim):
                vectors_MD[f + 1, d] = embedded_BFD[b, f, d]
        pair = np.uint64(dim)
        for i in range(1, num_vectors):
            for j in range(np.uint64(i)):
                lower_MM[i, j] = grad_out[b, pair + j]
            pair += np.uint64(i)
        for i in range(0, height, ROWS):
            for j in range(0, i + ROWS - 1, LANES):
                transpose_tile(symmetric_MM, lower_MM, i, j)
        for i in range(1, num_vectors):
            for j in range(i):
                symmetric_MM[i, j] = lower_MM[i, j]
        for i in range(0, height, ROWS):
            for d in range(0, depth, LANES):
                multiply_tile(grads_MD, i, d, symmetric_MM, vectors_MD, num_vectors)
        for d in range(dim):
            grad_bottom_BD[b, d] = grad_out[b, d] + grads_MD[0, d]
        for f in range(num_features):
            for d in range(dim):
                grad_embedded_BFD[b, f, d] = grads_MD[f + 1, d]
