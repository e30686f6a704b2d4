"""Bounds of what a peer's call may become: how large results are, how long code in C iterates.

They are wide: they keep a number in a message from killing the process, not a program from working.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable as AnyCallable
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.errors import NotAllowedError

MAX_VALUES = 1 << 22  # Python values made of one argument: more than any message contains
# an element of a result, unless an argument's are larger, and the largest there is
_ELEMENT_BYTES = 8
_MOST_ELEMENT_BYTES = 16

Function = AnyCallable[..., Any]
Array = Tensor | np.ndarray[Any, Any]


def too_large(what: str, need: str) -> NotAllowedError:
    """The error of a call that would become too large."""
    return NotAllowedError(
        what, need, "let a function of your own do it, in a module that the callee allows"
    )


def bounded(function: Function, max_bytes: int) -> Function:
    """``function``, for arguments that take at most ``max_bytes`` when they are broadcast.

    >>> column, row = torch.ones(1 << 20, 1), torch.ones(1, 1 << 20)
    >>> bounded(torch.add, 1 << 30)(column, row)
    Traceback (most recent call last):
    pibroch.errors.NotAllowedError: got a result of up to 8.8e+12 bytes; ...
    """

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        if kwargs.get("rounding_mode") is not None:
            # the smallest integer divided by -1 would kill the process
            raise NotAllowedError("a rounding mode of a division", "none", "round its result")
        num_elements = 1
        for array in (arrays := _arrays((*args, *kwargs.values()))):
            num_elements *= math.prod(array.shape) or 1
            if num_elements * _MOST_ELEMENT_BYTES > max_bytes:
                _check_broadcast(arrays, max_bytes)
                break
        return function(*args, **kwargs)

    return checked


def _arrays(values: Iterable[object]) -> list[Array]:
    arrays = list[Array]()
    for value in values:
        if isinstance(value, (Tensor, np.ndarray)):
            arrays.append(value)
        elif isinstance(value, (list, tuple)):
            arrays += _arrays(value)
    return arrays


def _check_broadcast(arrays: Sequence[Array], max_bytes: int) -> None:
    sizes: list[int] = []  # from the last dimension to the first
    for array in arrays:
        sizes = [max(pair) for pair in zip_longest(sizes, reversed(array.shape), fillvalue=1)]
    item_bytes = max(_ELEMENT_BYTES, *(array.dtype.itemsize for array in arrays))
    num_bytes = math.prod(sizes) * item_bytes
    if num_bytes > max_bytes:
        raise too_large(f"a result of up to {float(num_bytes):.3g} bytes", f"at most {max_bytes:,}")


def check_values(*values: object) -> None:
    """Refuse long ranges, tensors and arrays, where code in C iterates over their items.

    They stand for many more values than a message contains.
    """
    to_visit = [*values]
    while to_visit:
        value = to_visit.pop()
        if isinstance(value, (list, tuple)):
            to_visit += value
        elif isinstance(value, dict):
            to_visit += value.values()
        elif isinstance(value, (range, Tensor, np.ndarray)) and length_of(value) > MAX_VALUES:
            raise too_large(
                f"a {type(value).__name__} to be taken apart", f"at most {MAX_VALUES:,} items"
            )


def length_of(value: range | Tensor | np.ndarray[Any, Any]) -> int:
    """The number of items, over all dimensions."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return max(0, -((value.start - value.stop) // value.step))


def check_device(device: str) -> None:
    """Refuse devices without memory, which kernels do not check for."""
    if torch.device(device).type not in ("cpu", "cuda"):
        raise NotAllowedError(f"device {device!r}", "cpu or cuda")
