"""Numbers to what a model reads, by formulas that depend on nothing but the value itself.

Training days, later days and serving therefore see the same number for the same input (decision 4
of the foundation).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels import vocabulary

Transform = Literal["log", "identity"]

UNKNOWN_ROW = vocabulary.UNKNOWN_ROW
MISSING_ROW = vocabulary.MISSING_ROW
FIRST_ROW = vocabulary.FIRST_ROW

_NEGATIVE_BINS = 3
_HIGHEST_LOG_BIN = 1024
NUM_LOG_BIN_ROWS = FIRST_ROW + _NEGATIVE_BINS + 2 + _HIGHEST_LOG_BIN + 1
"""Rows of a table whose ids are logarithmic bins."""


def transform_dense(
    values: NDArray[np.float64], transform: Transform = "log"
) -> NDArray[np.float32]:
    """What a model reads for dense values; NaN means missing.

    ``log`` is ``sign(x) * log1p(|x|)``: monotonic, odd, and linear near zero. Missing becomes 0,
    infinities the nearest finite number, so the result is finite for every input. ``identity`` only
    does the latter two.

    >>> transform_dense(np.array([0.0, np.e - 1, 1 - np.e, np.nan, -np.inf])).round(1).tolist()
    [0.0, 1.0, -1.0, 0.0, -709.7999877929688]
    """
    finite = np.nan_to_num(np.asarray(values, np.float64), nan=0.0)
    if transform == "log":
        finite = np.copysign(np.log1p(np.abs(finite)), finite)
    limit = np.finfo(np.float32).max
    return np.clip(finite, -limit, limit).astype(np.float32)


def log_bin_rows(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Table rows for numbers used as categories; NaN means missing.

    Below zero the whole numbers -1, -2 and "-3 or less" have a bin each, 0 (up to 1) has one, 1 (up
    to 2) has one, and from 2 on the bin is ``floor(log(x)²)``, at most 1024: fine for small counts,
    coarse for large ones, and the same for every file.

    >>> log_bin_rows(np.array([np.nan, -9, -2, -1, 0, 1, 2, 3, 10, 1e300])).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 12, 1031]
    """
    below_two = np.floor(np.clip(np.nan_to_num(values, nan=0.0), -_NEGATIVE_BINS, 1))
    squared_log = np.square(np.log(np.maximum(np.nan_to_num(values, nan=2.0), 2.0)))
    above = 2 + np.minimum(np.floor(squared_log), _HIGHEST_LOG_BIN)
    bins = np.where(values >= 2, above, below_two) + _NEGATIVE_BINS
    return np.where(np.isnan(values), MISSING_ROW, FIRST_ROW + bins).astype(np.int64)
