"""Combine gradients by row and apply an optimizer.

An optimizer's update comes twice: for records of float32, and (``narrow_...``) for records whose
weights are bfloat16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Records
from pibroch.kernels.operation import Operation
from pibroch.kernels.scatter_update import naive, narrow, numba
from pibroch.kernels.scatter_update.hyper import Hyper
from pibroch.kernels.scatter_update.narrow import Rounding
from pibroch.kernels.scatter_update.numba import (
    ROWS_AT_ONCE,
    Grouped,
    adagrad,
    adam,
    combine,
    frozen,
    row_wise_adagrad,
    row_wise_adam,
    sgd,
)

narrow_sgd = narrow.sgd
narrow_adagrad = narrow.adagrad
narrow_row_wise_adagrad = narrow.row_wise_adagrad
narrow_adam = narrow.adam
narrow_row_wise_adam = narrow.row_wise_adam

__all__ = [
    "ROWS_AT_ONCE",
    "Grouped",
    "Hyper",
    "Rounding",
    "adagrad",
    "adam",
    "combine",
    "definition_of",
    "frozen",
    "narrow_adagrad",
    "narrow_adam",
    "narrow_row_wise_adagrad",
    "narrow_row_wise_adam",
    "narrow_sgd",
    "row_wise_adagrad",
    "row_wise_adam",
    "sgd",
    "sum_gradients",
]


def definition_of(update: Callable[..., Any]) -> Callable[[naive.Row, naive.Row, Hyper], None]:
    """What an update of this house means, on one row in float64.

    Returns:
        A function of a record ``[W]``, which it changes, its gradient ``[D]`` and the step's
        numbers.
    """
    definition: Callable[[naive.Row, naive.Row, Hyper], None] = getattr(naive, update.__name__)
    return definition


@Operation
def sum_gradients(gradients: Records, grouped: Grouped, share: float, totals: Records) -> None:
    """Write the gradient of each distinct row, summed in the group's order, times ``share``.

    Args:
        gradients: ``[N, unit]``, of which a gradient is one row or several.
        grouped: which of them belong to a row.
        share: of this rank in the global batch's mean.
        totals: ``[U, D]``.
    """
    parallel.run(numba.sum_gradients, len(totals), grouped, gradients, np.float32(share), totals)
