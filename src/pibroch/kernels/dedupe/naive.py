"""What dedupe means, in plain NumPy. Shapes as in :mod:`pibroch.kernels.dedupe.numba`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dedupe(
    row_ids: NDArray[np.int64], sequence: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Distinct rows rising, where each one's positions begin, and the positions by row.

    Those of a row are in the order of ``sequence``.

    >>> rows, segments, order = dedupe(np.array([7, 3, 7, 9]), np.arange(4, dtype=np.int32))
    >>> rows.tolist(), segments.tolist(), order.tolist()
    ([3, 7, 9], [0, 1, 3, 4], [1, 0, 2, 3])
    """
    order = sequence[np.argsort(row_ids[sequence], kind="stable")]
    rows, first = np.unique(row_ids[order], return_index=True)
    return rows, np.append(first, len(row_ids)).astype(np.int32), order.astype(np.int32)
