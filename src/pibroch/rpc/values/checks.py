"""Checks before functions of torch that a peer names.

How large their results would be, and how long they would take.

The bounds are wide: they keep a number in a message from ending the process, not a program from
working. They are worked out of shapes in ``result_sizes.py``; where only operands can make a result
large, as in ``a * b``, nothing is worked out as long as the product of all their sizes is small.
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

MAX_ELEMENTS = 1 << 31  # of a result whose size a peer says
MAX_VALUES = 1 << 22  # Python values made of one argument: that many come with no message
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
    """The integer that a number stands for, one of NumPy's or a tensor of one element among them.

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
    """Refuse a result of so many elements."""
    if num_elements > MAX_ELEMENTS:
        raise too_large(
            f"a result of {float(num_elements):.3g} elements", f"at most {MAX_ELEMENTS:,}"
        )


def check_values(*values: object) -> None:
    """Refuse what stands for many more values than came.

    Ranges and tensors, where code in C takes them apart one by one.
    """
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (range, Tensor, np.ndarray)) and length_of(value) > MAX_VALUES:
            raise too_large(
                f"a {type(value).__name__} to be taken apart", f"at most {MAX_VALUES:,} items"
            )


def length_of(value: range | Tensor | np.ndarray[Any, Any]) -> int:
    """How many items there are, of all dimensions."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return max(0, -((value.start - value.stop) // value.step))


def check_device(kwargs: dict[str, Any]) -> None:
    """Refuse what is no memory: kernels for other devices trust that there is one."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise NotAllowedError(f"device {device!r}", "cpu or cuda")
    if "out" in kwargs:
        raise NotAllowedError("an argument out", "none", "take the result")


def sized(function: Function, size: Size) -> Function:
    """``function`` after a look at how large its result will be."""

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        check_device(kwargs)
        check_values(*[arg for arg in args if not isinstance(arg, Tensor)])
        check_elements(size(args, kwargs))
        return function(*args, **kwargs)

    return checked


def broadcasting(function: Function, size: Size | None = None) -> Function:
    """``function``, after a look at its operands when their product is large."""
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
    """Elements of operands that are spread against each other."""
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
    """``function``, whose numbers are sizes and steps of windows: some kernels count through them."""

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
    """``function``, whose numbers are the sizes of a tensor of few dimensions."""

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
    """``function``, which makes a list of tensors out of one: not more than a message can hold."""
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
