"""Moving averages of rows at the cost of the touched ones.

A row that stands still moves its average by a power.

A record holds its weights, and from column ``first`` on their average ``[D]`` and the step at which
that average was taken ``[1]``. A row that stood at w since step s has at step t the average ``w +
(average_s - w) * decay ** (t - s)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Records, Stored
from pibroch.kernels.bits import widened
from pibroch.kernels.policy import kernel


@kernel
def advance(
    records: Records,
    rows: NDArray[np.int64],
    dim: int,
    first: int,
    decay: float,
    step: int,
    start: int,
    stop: int,
) -> None:
    """Bring the averages of ``rows[start:stop]`` to ``step``, by the weights as they stand.

    Called for ``step - 1`` before the weights change and for ``step`` after: the first catches up,
    the second blends in.
    """
    for u in range(start, stop):
        row = rows[u]
        keep = np.float32(decay ** (step - records[row, first + dim]))
        for d in range(dim):
            weight = records[row, d]
            records[row, first + d] = weight + keep * (records[row, first + d] - weight)
        records[row, first + dim] = step


@kernel
def averaged_rows(
    records: Records,
    stored: Stored,
    row_ids: NDArray[np.int64],
    first: int,
    decay: float,
    step: int,
    out: Records,
    start: int,
    stop: int,
) -> None:
    """Write the averages at ``step`` of ``row_ids[start:stop]`` to ``out`` ``[V, D]``.

    The records stay as they are.

    ``stored`` are the records in the type of their weights.
    """
    dim = out.shape[1]
    for position in range(start, stop):
        row = row_ids[position]
        keep = np.float32(decay ** (step - records[row, first + dim]))
        for d in range(dim):
            weight = widened(stored[row, d])
            out[position, d] = weight + keep * (records[row, first + d] - weight)
