"""The arrays that everything is made of, by the names that signatures use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.float32]
"""Row records, their weights alone, or gradients, ``[rows, floats]``; a message of them lies flat."""

Ints = NDArray[np.int64]
"""Row ids, addresses, counts, offsets."""

RowIds = NDArray[np.signedinteger]
"""Row ids or addresses, int32 where they all fit."""

Bytes = NDArray[np.uint8]
"""Encoded numbers."""
