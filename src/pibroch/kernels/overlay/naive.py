"""What the kernels mean, without a thought of speed.

Shapes as in :mod:`pibroch.kernels.overlay.numba`.
"""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Ints


def redirect(row_ids: Ints, changed: Ints, first: int) -> Ints:
    """Row ids ``[V]``, of which a changed one becomes ``first`` plus its last place there.

    >>> redirect(np.array([7, 3, 8, 3]), np.array([3, 8, 3]), 100).tolist()
    [7, 102, 101, 102]
    """
    places = {int(row): place for place, row in enumerate(changed)}
    return np.array(
        [first + places[int(row)] if int(row) in places else row for row in row_ids], np.int64
    )
