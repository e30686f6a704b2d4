"""Numbers to what a model reads, by formulas that depend on nothing but the value itself.

Training days, later days and serving therefore see the same number for the same input (decision 4
of the foundation).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels import vocabulary

Transform = Literal["log", "identity"]
Binning = Literal["log", "hour", "weekday"]
Bounds = tuple[float, ...]

UNKNOWN_ROW = vocabulary.UNKNOWN_ROW
MISSING_ROW = vocabulary.MISSING_ROW
FIRST_ROW = vocabulary.FIRST_ROW

_NEGATIVE_BINS = 3
_HIGHEST_LOG_BIN = 1024
NUM_LOG_BIN_ROWS = FIRST_ROW + _NEGATIVE_BINS + 2 + _HIGHEST_LOG_BIN + 1
"""Rows of a table whose ids are logarithmic bins."""

LARGEST = float(np.sqrt(np.finfo(np.float32).max))
"""Of what a model reads: a larger number's square is infinite in float32."""
_HOUR_SECONDS = 3600
_DAY_SECONDS = 24 * _HOUR_SECONDS
_FIRST_WEEKDAY = 3  # 1970 began on a Thursday; Monday is 0


def num_bin_rows(binning: Binning | Bounds) -> int:
    """Rows of a table whose ids are bins."""
    sizes = {"log": NUM_LOG_BIN_ROWS - FIRST_ROW, "hour": 24, "weekday": 7}
    return FIRST_ROW + (sizes[binning] if isinstance(binning, str) else len(binning) + 1)


def bin_rows(values: NDArray[np.float64], binning: Binning | Bounds) -> NDArray[np.int64]:
    """Table rows for numbers used as categories; NaN means missing.

    ``log``: :func:`log_bin_rows`. ``hour`` and ``weekday``: of Unix seconds, in UTC, from midnight
    and from Monday on. Bounds: how many of them a number has reached.

    >>> bin_rows(np.array([np.nan, 0, 18, 70]), (18.0, 65.0)).tolist()
    [1, 2, 3, 4]
    >>> monday_at_one = np.array([1_700_000_000 - 1_700_000_000 % 86_400 - 86_400 + 3_600.0])
    >>> bin_rows(monday_at_one, "hour").tolist(), bin_rows(monday_at_one, "weekday").tolist()
    ([3], [2])
    """
    if binning == "log":
        return log_bin_rows(values)
    present = np.nan_to_num(values, nan=0.0)
    if isinstance(binning, tuple):
        bins = np.searchsorted(np.array(binning), present, side="right")
    elif binning == "hour":
        bins = np.floor(present / _HOUR_SECONDS) % 24
    else:
        bins = (np.floor(present / _DAY_SECONDS) + _FIRST_WEEKDAY) % 7
    return np.where(np.isnan(values), MISSING_ROW, FIRST_ROW + bins).astype(np.int64)


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
    finite = np.asarray(values, np.float64)
    if not np.isfinite(finite).all():
        finite = np.nan_to_num(finite, nan=0.0)
    if transform == "log":
        return np.copysign(np.log1p(np.abs(finite)), finite).astype(np.float32)
    limit = np.finfo(np.float32).max
    return np.clip(finite, -limit, limit).astype(np.float32)


def standardised(values: NDArray[np.float32], mean: float, std: float) -> NDArray[np.float32]:
    """``(values - mean) / std`` in float32."""
    return (values - np.float32(mean)) / np.float32(std)


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
