"""Types in which rows and gradients travel, and messages that mix them: records stay float32, weights alone may be narrow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.errors import ConfigError

Records = NDArray[np.float32]
WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def wire_type(name: str) -> torch.dtype:
    """The type of this name.

    Raises:
        ConfigError: when there is none.
    """
    if name not in WIRES:
        raise ConfigError(f"wire {name!r}", f"one of {', '.join(WIRES)}")
    return WIRES[name]


def rounded(rows: Records, wire: torch.dtype) -> Records:
    """What arrives of rows that travel in this type. Rows that are here already are read the same: places change no bit."""
    if wire == torch.float32:
        return rows
    result: Records = torch.from_numpy(rows).to(wire).float().numpy()
    return result


def narrow(message: Records, spans: Sequence[Sequence[int]], wire: torch.dtype) -> tuple[Tensor, list[int]]:
    """A message whose weights are of a 16-bit type, as int16 ``[units]``, and its units for each rank.

    Args:
        message: float32; for each rank in turn whole records, then weights.
        spans: for each rank the floats of its records, and those of its weights.
        wire: type of the weights.
    """
    parts = []
    for records, weights in zip(*_split(message, spans), strict=True):
        parts += [records.view(np.int16), torch.from_numpy(weights).to(wire).view(torch.int16).numpy()]
    return torch.from_numpy(np.concatenate(parts)), units_of(spans)


def widen(came: Tensor, spans: Sequence[Sequence[int]], wire: torch.dtype, message: Records) -> None:
    """The inverse of :func:`narrow`: fill ``message`` from what came."""
    records, weights = _split(message, spans)
    units = iter(came.split([unit for whole, lent in spans for unit in (2 * whole, lent)]))
    for whole, lent in zip(records, weights, strict=True):
        whole.view(np.int16)[:] = next(units).numpy()
        torch.from_numpy(lent).copy_(next(units).view(wire))


def units_of(spans: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of 16 bits that a message has for each rank."""
    return [2 * whole + lent for whole, lent in spans]


def _split(floats: Records, spans: Sequence[Sequence[int]]) -> tuple[Sequence[Records], Sequence[Records]]:
    """Views of all ranks' records, and of their weights."""
    pieces = np.split(floats, np.cumsum([size for span in spans for size in span])[:-1])
    return pieces[0::2], pieces[1::2]
