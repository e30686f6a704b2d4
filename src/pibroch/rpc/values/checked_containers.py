"""Methods of lists, dicts, sets and queues that a peer may call through a reference.

They work on single items, or on all without changing them; none repeats, joins, formats, or sorts
by a function. Those that take other items check them first.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from pibroch.rpc.values.checks import Function, check_values
from pibroch.rpc.values.forms import check_hashes


def _extend(container: Any, items: Iterable[Any]) -> None:
    check_values(items)
    container.extend(items)


def _extend_left(container: Any, items: Iterable[Any]) -> None:
    check_values(items)
    container.extendleft(items)


def _set_item(container: Any, place: Any, item: Any) -> None:
    if isinstance(place, slice):
        check_values(item)
    container[place] = item


def _update(container: Any, items: Any = (), **named: Any) -> None:
    check_values(items)
    if not isinstance(items, Mapping | set | frozenset | str | bytes):
        items = [*items]
        has_pairs = isinstance(container, dict) and not isinstance(container, collections.Counter)
        check_hashes([pair[0] for pair in items] if has_pairs else items)
    container.update(items, **named)


def _methods(names: str, **checked: Function) -> dict[str, Function | str]:
    common = "__contains__ __eq__ __len__ __ne__ __repr__ __str__ clear copy pop"
    return {name: name for name in (*common.split(), *names.split())} | checked


_OF_DICTS = "__delitem__ __getitem__ __setitem__ get popitem setdefault"
_OF_LISTS = "__delitem__ __getitem__ append count index insert remove reverse"
CONTAINERS: dict[type, dict[str, Function | str]] = {
    list: _methods(_OF_LISTS, extend=_extend, __setitem__=_set_item),
    dict: _methods(_OF_DICTS, update=_update),
    collections.OrderedDict: _methods(f"{_OF_DICTS} move_to_end", update=_update),
    collections.defaultdict: _methods(_OF_DICTS, update=_update),
    collections.Counter: _methods(f"{_OF_DICTS} most_common total", update=_update),
    set: _methods("add discard remove", update=_update),
    collections.deque: _methods(
        f"{_OF_LISTS} __setitem__ appendleft popleft rotate",
        extend=_extend,
        extendleft=_extend_left,
    ),
}
