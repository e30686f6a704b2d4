"""Parts of grids and of random cases: each pair is tried and not each triple.

`make soak` tries all.
"""

import os
from collections.abc import Iterable
from itertools import islice, product
from typing import Any, TypeVar

T = TypeVar("T")
WHOLE = os.environ.get("PIBROCH_SOAK_WHOLE_GRIDS") == "1"


def some(items: Iterable[T], first: int, every: int) -> list[T]:
    """Each ``every``-th item, beginning with place ``first`` modulo ``every``; all in a soak.

    Of tests numbered by the sum of their other arguments' places each two arguments then meet.

    >>> some("abcdef", 4, 3)
    ['b', 'e']
    """
    return list(items) if WHOLE else list(islice(items, first % every, None, every))


def cells(*axes: Iterable[Any], every: int = 2) -> list[tuple[Any, ...]]:
    """Cells of a grid, those whose places add up to a multiple of ``every``; all in a soak.

    Of three axes each two values meet where an axis has ``every`` values.

    >>> cells("ab", "xyz")
    [('a', 'x'), ('a', 'z'), ('b', 'y')]
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        tuple(value for _, value in cell)
        for cell in product(*numbered)
        if WHOLE or sum(place for place, _ in cell) % every == 0
    ]


def examples(most: int) -> int:
    """How many random cases are drawn: ``most`` in a soak, a third otherwise."""
    return most if WHOLE else most // 3
