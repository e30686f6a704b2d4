"""Which ranks hold which parts of a model.

What belongs to a group of ranks is in no other rank's copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from torch import nn

Parts = Mapping[str, tuple[int, ...]]
"""Submodules that groups hold: name in the model to the group's ranks, by their numbers in the run.
"""

_MEMBERS: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
_PARTS: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def assign(module: nn.Module, members: tuple[int, ...]) -> None:
    """Say that a module belongs to a group of ranks, of which this is one."""
    _MEMBERS[module] = members


def own_parts(model: nn.Module) -> Parts:
    """What of a model belongs to groups that this rank is in.

    The model itself does not count, nor parts of parts.
    """
    parts: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if name and module in _MEMBERS and not is_within(name, parts):
            parts[name] = _MEMBERS[module]
    return parts


def note_parts(model: nn.Module, parts: Parts) -> None:
    """Keep what belongs to groups of any ranks, as all ranks have told each other."""
    _PARTS[model] = parts


def all_parts(model: nn.Module) -> Parts:
    """What of a data-parallel model belongs to groups of any ranks; empty for most models."""
    return _PARTS.get(model, {})


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Whether a tensor or module belongs to one of some parts.

    >>> is_within("towers.1.weight", ["towers.1"]), is_within("towers.10.weight", ["towers.1"])
    (True, False)
    """
    return any(name.startswith(f"{part}.") for part in parts)
