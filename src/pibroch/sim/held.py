"""Memory that objects of a run hold: the arrays and tensors behind them, each once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

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
    seen = {key for thing in but for key in _sizes(_walk(thing))}
    counted = _sizes(_walk(things))
    return sum(size for key, size in counted.items() if key not in seen)


def held_by_kind(
    things: Iterable[object], kinds: Mapping[type, str], but: tuple[type, ...]
) -> dict[str, int]:
    """Bytes of what is found in things inside objects of some kinds, by the names of these.

    Args:
        things: looked into, with what their futures have.
        kinds: names; of a kind within another one the outer one's counts.
        but: kinds that are not looked into.
    """
    inside: dict[str, list[object]] = {name: [] for name in kinds.values()}
    deque(_walk(things, kinds, but, inside), maxlen=0)
    return {name: sum(_sizes(_walk(found, but=but)).values()) for name, found in inside.items()}


def _sizes(arrays: Iterable[Tensor | np.ndarray]) -> dict[int, int]:
    """Bytes of the memory behind arrays and tensors, by its address."""
    sizes: dict[int, int] = {}
    for each in arrays:
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            address = storage.data_ptr()
            size = storage.nbytes()
        else:
            base = each
            while isinstance(base.base, np.ndarray):
                base = base.base
            address = base.ctypes.data
            size = base.nbytes
        sizes[address] = max(size, sizes.get(address, 0))  # of a tensor's there may be a part
    return sizes


def _walk(
    thing: object,
    kinds: Mapping[type, str] | None = None,
    but: tuple[type, ...] = (),
    inside: dict[str, list[object]] | None = None,
) -> Iterator[Tensor | np.ndarray]:
    """Arrays and tensors below a thing; objects of some kinds are kept, and not looked into."""
    left = [thing]
    visited: set[int] = set()
    kept = []  # so that no two objects have one identity
    while left:
        each = left.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        kept.append(each)
        named = kinds or {}
        name = next((name for kind, name in named.items() if isinstance(each, kind)), None)
        if name is not None and inside is not None:
            inside[name].append(each)
        elif isinstance(each, Tensor | np.ndarray):
            yield each
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, _CONTAINERS):
            left += each
        elif isinstance(each, Future):
            if each.done() and each.exception() is None:
                left.append(each.result())
        elif type(each).__module__.startswith("pibroch.") and not isinstance(each, but):
            left += _attributes(each)


def _attributes(thing: object) -> list[object]:
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    return [getattr(thing, name, None) for name in {*slots, *getattr(thing, "__dict__", ())}]


def _slots(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    return [names] if isinstance(names, str) else [name for name in names if name[:2] != "__"]
