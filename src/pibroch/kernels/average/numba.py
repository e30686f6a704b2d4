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
    """See :func:`pibroch.kernels.average.advance`; of ``rows[start:stop]``."""
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
    """See :func:`pibroch.kernels.average.averaged_rows`; of ``row_ids[start:stop]``."""
    dim = out.shape[1]
    for position in range(start, stop):
        row = row_ids[position]
        keep = np.float32(decay ** (step - records[row, first + dim]))
        for d in range(dim):
            weight = widened(stored[row, d])
            out[position, d] = weight + keep * (records[row, first + d] - weight)
