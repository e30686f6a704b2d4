"""Checks of calls by peers to functions of torch: how large results would be, how long they take.

The bounds are wide: they keep a number in a message from killing the process, not a program from
working. Sizes of results are computed from shapes in ``result_sizes.py``; where only operands can
make a result large, as in ``a * b``, only if the product of all their sizes is large.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable as AnyCallable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.errors import NotAllowedError

MAX_ELEMENTS = 1 << 31  # of a result whose size a peer chooses
MAX_VALUES = 1 << 22  # Python values made of one argument: more than any message contains
MAX_PARTS = 1 << 16
MAX_DIMS = 64
MAX_WINDOW = 1 << 16

Function = AnyCallable[..., Any]
Size = AnyCallable[[tuple[Any, ...], dict[str, Any]], int]


def too_large(what: str, need: str) -> NotAllowedError:
    """The error of a call that would become too large."""
    return NotAllowedError(
        what, need, "let a function of your own do it, in a module that the callee allows"
    )


def integer(value: object) -> int | None:
    """A number as an integer, also one of NumPy or a tensor of one element; else ``None``.

    >>> integer(np.int64(3)), integer(torch.tensor(4)), integer(2.0)
    (3, 4, None)
    """
    if isinstance(value, (int, np.integer)) or (isinstance(value, Tensor) and value.numel() == 1):
        try:
            return operator.index(value)
        except (TypeError, RuntimeError):  # not of an integer type, or without data
            return None
    return None


def check_elements(num_elements: int) -> None:
    """Refuse a result of more than ``MAX_ELEMENTS`` elements."""
    if num_elements > MAX_ELEMENTS:
        raise too_large(
            f"a result of {float(num_elements):.3g} elements", f"at most {MAX_ELEMENTS:,}"
        )


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


def check_device(kwargs: dict[str, Any]) -> None:
    """Refuse devices without memory, which kernels do not check for, and ``out``."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise NotAllowedError(f"device {device!r}", "cpu or cuda")
    if "out" in kwargs:
        raise NotAllowedError("an argument out", "none", "take the result")


def sized(function: Function, size: Size) -> Function:
    """``function``, after a check of its result's size."""

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        check_device(kwargs)
        check_values(*[arg for arg in args if not isinstance(arg, Tensor)])
        check_elements(size(args, kwargs))
        return function(*args, **kwargs)

    return checked


def broadcasting(function: Function, size: Size | None = None) -> Function:
    """``function``, after a check of its result's size if the product of its operands is large."""
    size_of = size or spread

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        product = 1
        for arg in args:
            if isinstance(arg, Tensor):
                product *= arg.numel() or 1
            elif isinstance(arg, (list, tuple)):
                product = _product(arg, product)
        if kwargs:
            product = _product([*kwargs.values()], product)
        if product > MAX_ELEMENTS:
            check_elements(size_of(args, kwargs))
        return function(*args, **kwargs)

    checked.is_lenient = True  # type: ignore[attr-defined]
    return checked


def spread(args: tuple[object, ...], kwargs: dict[str, Any]) -> int:
    """The number of elements of all operands broadcast against each other."""
    sizes: list[int] = []
    for shape in (arg.shape for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)):
        sizes = [max(pair) for pair in _aligned(sizes, shape)]
    return _product_of(sizes)


def _aligned(first: Any, second: Any) -> list[tuple[int, int]]:
    length = max(len(first), len(second))
    return list(
        zip(
            [1] * (length - len(first)) + [*first],
            [1] * (length - len(second)) + [*second],
            strict=True,
        )
    )


def _product_of(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _product(values: Any, product: int) -> int:
    for value in values:
        if isinstance(value, Tensor):
            product *= value.numel() or 1
        elif isinstance(value, (list, tuple)):
            product = _product(value, product)
    return product


def windowed(function: Function) -> Function:
    """``function``, whose numbers are sizes and steps of windows that some kernels iterate over."""

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        check_device(kwargs)
        numbers = [*args, *kwargs.values()]
        for number in (
            each
            for item in numbers
            for each in (item if isinstance(item, (list, tuple)) else [item])
        ):
            size = integer(number)
            if size is not None and abs(size) > MAX_WINDOW:
                raise too_large(f"a window of {size:,}", f"at most {MAX_WINDOW:,}")
        return function(*args, **kwargs)

    return checked


def shaped(function: Function) -> Function:
    """``function``, whose numbers are the sizes of a tensor, for at most ``MAX_DIMS`` of them."""

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        num_sizes = sum(
            len(arg) if isinstance(arg, (list, tuple)) else 1 for arg in (*args, *kwargs.values())
        )
        if num_sizes > MAX_DIMS:
            raise too_large(f"{num_sizes:,} sizes", f"at most {MAX_DIMS}")
        return function(*args, **kwargs)

    return checked


def in_parts(function: Function) -> Function:
    """``function``, which splits a tensor, for at most as many parts as a message can hold."""
    is_unbind = function.__name__ == "unbind"
    by_size = function.__name__ == "split"

    @functools.wraps(function)
    def checked(tensor: Tensor, *args: object, **kwargs: object) -> object:
        number = (
            args[0]
            if args
            else next((value for name, value in kwargs.items() if name != "dim" or is_unbind), 0)
        )
        longest = max(tensor.shape, default=0)
        num_parts = (
            number.numel()
            if isinstance(number, Tensor)
            else number
            if isinstance(number, int)
            else 0
        )
        if is_unbind:
            num_parts = tensor.shape[num_parts] if -tensor.dim() <= num_parts < tensor.dim() else 0
        elif by_size:
            num_parts = longest // max(num_parts, 1) if isinstance(number, int) else 0
        if num_parts > MAX_PARTS:
            raise too_large(f"a tensor in {num_parts:,} parts", f"at most {MAX_PARTS:,}")
        return function(tensor, *args, **kwargs)

    return checked
