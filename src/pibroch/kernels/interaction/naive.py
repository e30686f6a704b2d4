"""What the DLRM dot interaction means, in plain NumPy.

Shape legend: B samples, F features, D embedding width, M = F + 1 vectors of a sample, P = M (M - 1)
/ 2 pairs.
"""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array


def forward(bottom_BD: Array, embedded_BFD: Array) -> Array:
    """The bottom vector followed by the dot products of all pairs of vectors, ``[B, D + P]``.

    Pairs come in the order of the strictly lower triangle, row by row: (1, 0), (2, 0), (2, 1), (3,
    0), ...

    >>> forward(np.array([[1.0, 2.0]]), np.array([[[3.0, 4.0], [5.0, 6.0]]]))
    array([[ 1.,  2., 11., 17., 39.]])
    """
    vectors_BMD = np.concatenate([bottom_BD[:, None], embedded_BFD], axis=1)
    dots_BMM = vectors_BMD @ vectors_BMD.transpose(0, 2, 1)
    rows, columns = np.tril_indices(vectors_BMD.shape[1], k=-1)
    return np.concatenate([bottom_BD, dots_BMM[:, rows, columns]], axis=1)


def backward(bottom_BD: Array, embedded_BFD: Array, grad_out: Array) -> tuple[Array, Array]:
    """Gradients ``[B, D]`` and ``[B, F, D]`` of the inputs of `forward`, given that of its output.

    A pair's gradient flows to both of its vectors, so the pair gradients form a symmetric matrix
    with a zero diagonal.
    """
    vectors_BMD = np.concatenate([bottom_BD[:, None], embedded_BFD], axis=1)
    batch, num_vectors, dim = vectors_BMD.shape
    rows, columns = np.tril_indices(num_vectors, k=-1)
    grad_dots_BMM = np.zeros((batch, num_vectors, num_vectors), grad_out.dtype)
    grad_dots_BMM[:, rows, columns] = grad_dots_BMM[:, columns, rows] = grad_out[:, dim:]
    grad_vectors_BMD = grad_dots_BMM @ vectors_BMD
    return grad_out[:, :dim] + grad_vectors_BMD[:, 0], grad_vectors_BMD[:, 1:]
