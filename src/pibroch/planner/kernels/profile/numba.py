"""Count accesses to the rows of a table, and the batches in which they occur, batch by batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel


@kernel
def count_batch(
    ids: NDArray[np.int64],
    number: int,
    accesses: NDArray[np.int64],
    batches: NDArray[np.int32],
    last_batch: NDArray[np.int32],
) -> int:
    """Count the ids of one batch ``[V]`` into ``accesses`` and ``batches`` ``[num_rows]``.

    Args:
        ids: of the batch; several calls with one ``number`` count as one batch.
        number: of the batch, from 1.
        accesses: raised by one for each id.
        batches: raised by one for each distinct id of a batch.
        last_batch: the number of the batch in which a row occurred last, 0 for none yet.

    Returns:
        The position of the first id outside the table, or -1; ids behind it are not counted.
    """
    num_rows = len(accesses)
    for position in range(len(ids)):
        row = ids[position]
        if row < 0 or row >= num_rows:
            return position
        accesses[row] += 1
        if last_batch[row] != number:
            last_batch[row] = number
            batches[row] += 1
    return -1
