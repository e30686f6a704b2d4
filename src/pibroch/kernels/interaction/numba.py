"""The DLRM dot interaction for CPUs: one pass over the samples, all scratch of a sample in the first-level cache.

Both directions are products of small matrices. Their inner loops run over contiguous memory in whole vectors and take
eight multiply-adds for each load and store of the sum; scratch is padded with zeros, so no loop has a scalar rest.

Shape legend: B samples, F features, D embedding width, M = F + 1 vectors of a sample, P = M (M - 1) / 2 pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pibroch.kernels.policy import kernel

UNROLL = 8  # multiply-adds per load and store of a sum
LANES = 16  # float32 in the widest vector register


@kernel
def _padded(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


@kernel
def _add_eight(total: Any, weights: Any, rows: Any, width: int) -> None:
    """``total[:width] += weights[:8] @ rows[:8, :width]``; the widths are multiples of `LANES`."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    w4, w5, w6, w7 = weights[4], weights[5], weights[6], weights[7]
    for k in range(width):
        left = (w0 * rows[0, k] + w1 * rows[1, k]) + (w2 * rows[2, k] + w3 * rows[3, k])
        right = (w4 * rows[4, k] + w5 * rows[5, k]) + (w6 * rows[6, k] + w7 * rows[7, k])
        total[k] += left + right


@kernel
def forward(bottom_BD: Any, embedded_BFD: Any, out: Any, start: int, stop: int) -> None:
    """Fill ``out[start:stop]``, float32 ``[B, D + P]``, as `naive.forward` does."""
    num_features, dim = embedded_BFD.shape[1], embedded_BFD.shape[2]
    num_vectors, num_pairs = num_features + 1, num_features * (num_features + 1) // 2
    width, depth = _padded(num_vectors, LANES), _padded(dim, UNROLL)
    vectors_MD = np.zeros((num_vectors, depth), np.float32)
    vectors_DM = np.zeros((depth, width), np.float32)
    pairs = np.zeros(num_pairs + width, np.float32)
    for b in range(start, stop):
        for d in range(dim):
            vectors_MD[0, d] = bottom_BD[b, d]
            vectors_DM[d, 0] = bottom_BD[b, d]
        for f in range(num_features):
            for d in range(dim):
                vectors_MD[f + 1, d] = embedded_BFD[b, f, d]
                vectors_DM[d, f + 1] = embedded_BFD[b, f, d]
        pairs[:] = 0
        first = 0
        for i in range(1, num_vectors):
            line = pairs[first:]  # whole vectors: what is written past pair (i, i - 1) is wiped by the next row
            span = _padded(i, LANES)
            line[:span] = 0
            for d in range(0, depth, UNROLL):
                _add_eight(line, vectors_MD[i, d:], vectors_DM[d:], span)
            first += i
        out[b, :dim] = bottom_BD[b]
        out[b, dim:] = pairs[:num_pairs]


@kernel
def backward(
    bottom_BD: Any, embedded_BFD: Any, grad_out: Any, grad_bottom_BD: Any, grad_embedded_BFD: Any, start: int, stop: int
) -> None:
    """Fill ``grad_bottom_BD[start:stop]`` and ``grad_embedded_BFD[start:stop]`` as `naive.backward` does."""
    num_features, dim = embedded_BFD.shape[1], embedded_BFD.shape[2]
    num_vectors = num_features + 1
    width, depth = _padded(dim, LANES), _padded(num_vectors, UNROLL)
    vectors_MD = np.zeros((depth, width), np.float32)
    grad_dots_MM = np.zeros((depth, depth), np.float32)
    total = np.zeros(width, np.float32)
    for b in range(start, stop):
        vectors_MD[0, :dim] = bottom_BD[b]
        for f in range(num_features):
            vectors_MD[f + 1, :dim] = embedded_BFD[b, f]
        pair = dim
        for i in range(1, num_vectors):
            for j in range(i):
                grad_dots_MM[i, j] = grad_dots_MM[j, i] = grad_out[b, pair + j]
            pair += i
        for i in range(num_vectors):
            total[:] = 0
            for j in range(0, depth, UNROLL):
                _add_eight(total, grad_dots_MM[i, j:], vectors_MD[j:], width)
            if i == 0:
                for d in range(dim):
                    grad_bottom_BD[b, d] = grad_out[b, d] + total[d]
            else:
                for d in range(dim):
                    grad_embedded_BFD[b, i - 1, d] = total[d]
