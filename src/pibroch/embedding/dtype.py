"""Of which type weights are in memory, and how much of a record they take."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "bfloat16"]


def weight_floats(dim: int, dtype: Dtype) -> int:
    """How many float32 the weights of a row take in its record.

    >>> weight_floats(5, "float32"), weight_floats(5, "bfloat16")
    (5, 3)
    """
    return dim if dtype == "float32" else (dim + 1) // 2
