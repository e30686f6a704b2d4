"""The arrays that everything is made of, by the names that signatures use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.float32]
"""Row records, their weights alone, or gradients, ``[rows, floats]``; a message of them lies flat.
"""

Stored = NDArray[np.float32] | NDArray[np.uint16]
"""Row records in the type of their weights.

Float32 ``[rows, W]`` as they are, or for bfloat16 weights the same memory as uint16
``[rows, 2 * W]``, whose first D numbers are their bits.
"""

Ints = NDArray[np.int64]
"""Row ids, addresses, counts, offsets."""

RowIds = NDArray[np.signedinteger]
"""Row ids or addresses, int32 where they all fit."""

Bytes = NDArray[np.uint8]
"""Encoded numbers."""

Array = NDArray[Any]
"""Of whatever numbers."""
