"""Arguments of a call to a function of torch, by place or by name, and sizes among them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pibroch.rpc.values.checks import MAX_DIMS, integer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
HUGE = 1 << 100


def argument(args: Args, kwargs: Kwargs, place: int, name: str, default: object = None) -> Any:
    """An argument that may be given by place or by name."""
    return args[place] if place < len(args) else kwargs.get(name, default)


def product(sizes: Iterable[object]) -> int:
    """Of sizes, those below 1 and what is no integer left out.

    Huge for more dimensions than a tensor may have.
    """
    kept = [size for size in map(integer, sizes) if size is not None and size > 0]
    return math.prod(kept) if len(kept) <= MAX_DIMS else HUGE
