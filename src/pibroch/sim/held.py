"""Memory that objects of a run hold: the arrays and tensors behind them, each once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from torch import Tensor

_CONTAINERS = (list, tuple, set, frozenset, deque)


def held_bytes(*things: object, but: Iterable[object] = ()) -> int:
    """Bytes of all memory that things hold, but for what ``but`` holds.

    Looked into are containers and objects of pibroch. Memory that was taken and never written
    counts: it may not be resident.

    Example:
        >>> rows = np.zeros((4, 2), np.float32)
        >>> held_bytes([rows, {"first": rows[:2]}], np.zeros(3, np.int64), but=[rows[1:]])
        24
    """
    seen = {key for thing in but for key, _ in _memory(thing, set())}
    counted = dict(_memory(things, set()))
    return sum(size for key, size in counted.items() if key not in seen)


def _memory(thing: object, visited: set[int]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each array and tensor below a thing."""
    left = [thing]
    kept = []  # so that no two objects have one identity
    while left:
        each = left.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        kept.append(each)
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            # a shape alone has no address, but the size of what it is the shape of
            yield id(each) if each.is_meta else storage.data_ptr(), storage.nbytes()
        elif isinstance(each, np.ndarray):
            base = each
            while isinstance(base.base, np.ndarray):
                base = base.base
            yield base.ctypes.data, base.nbytes
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, _CONTAINERS):
            left += each
        elif type(each).__module__.startswith("pibroch."):
            left += _attributes(each)


def _attributes(thing: object) -> list[object]:
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    return [getattr(thing, name, None) for name in {*slots, *getattr(thing, "__dict__", ())}]


def _slots(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    return [names] if isinstance(names, str) else [name for name in names if name[:2] != "__"]
