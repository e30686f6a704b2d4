"""What the moving average of a row means: every row takes part in every step, touched or not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def averages(history: list[NDArray[np.float64]], decay: float) -> NDArray[np.float64]:
    """Average after a history of weights ``[num_rows, D]``.

    The first entry is the initial weights, then there is one a step:

    ``average_0 = weights_0``, then ``average_t = decay * average_{t-1} + (1 - decay) * weights_t``
    for all rows.
    """
    average = history[0].copy()
    for weights in history[1:]:
        average = decay * average + (1 - decay) * weights
    return average
