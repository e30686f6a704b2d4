"""Checks of single functions of torch, each for a reason of its own.

Each function here takes the place of the function of torch that its docstring names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.checks import (
    MAX_ELEMENTS,
    MAX_VALUES,
    Function,
    broadcasting,
    check_device,
    check_elements,
    check_values,
    sized,
    too_large,
)
from pibroch.rpc.values.result_sizes import SIZES, size_of_index, unfold_view_size


def of_data(function: Function) -> Function:
    """``torch.tensor`` and the like: Python data, in which tensors may stand for numbers."""

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        check_device(kwargs)
        data = [each for each in (*args, *kwargs.values()) if not isinstance(each, Tensor)]
        check_values(data)
        to_visit = [item for item in data if isinstance(item, (list, tuple))]
        num_values = 0
        while to_visit:
            for item in to_visit.pop():
                if isinstance(item, (list, tuple)):
                    to_visit.append(item)
                elif isinstance(item, Tensor):
                    num_values += item.numel()
        if num_values > MAX_VALUES:
            raise too_large(
                f"tensors of {num_values:,} elements as Python data", f"at most {MAX_VALUES:,}"
            )
        return function(*args, **kwargs)

    return checked


def division(function: Function) -> Function:
    """``torch.div``: the smallest integer divided by -1 with truncation would kill the process."""
    divide = broadcasting(function)

    @functools.wraps(function)
    def checked(dividend: object, divisor: object, **kwargs: object) -> object:
        if kwargs.get("rounding_mode") == "trunc" and _has(dividend, None) and _has(divisor, -1):
            raise NotAllowedError("the smallest integer divided by -1", "a quotient that there is")
        return divide(dividend, divisor, **kwargs)

    checked.is_lenient = True  # type: ignore[attr-defined]
    return checked


def _has(value: object, number: int | None) -> bool:
    """Whether ``value`` contains an integer; ``None`` for the smallest integer of its type."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            return False
        return bool((value == (torch.iinfo(value.dtype).min if number is None else number)).any())
    return number is None or value == number


def zeros(*args: object, **kwargs: object) -> object:
    """In place of ``torch.empty``, which shows what was in memory before."""
    return _zeros(
        *args, **{name: value for name, value in kwargs.items() if name != "memory_format"}
    )


def zeros_like(*args: object, **kwargs: object) -> object:
    """In place of ``torch.empty_like``."""
    return _zeros_like(*args, **kwargs)


def new_zeros(tensor: Tensor, *args: object, **kwargs: object) -> object:
    """In place of ``Tensor.new_empty``."""
    return _new_zeros(tensor, *args, **kwargs)


_zeros = sized(torch.zeros, SIZES["zeros"])
_new_zeros = sized(torch.Tensor.new_zeros, SIZES["new_zeros"])
_zeros_like = sized(torch.zeros_like, SIZES["zeros_like"])


def legacy_tensor(*args: object) -> object:
    """In place of ``torch.Tensor``: data, or sizes of a tensor of zeros; never an address."""
    if all(type(arg) is int for arg in args):
        return _zeros(args)
    if len(args) == 1 and isinstance(args[0], torch.Size):
        return _zeros(args[0])
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return _tensor(args[0], dtype=torch.get_default_dtype())
    if len(args) == 1 and isinstance(args[0], Tensor):
        return args[0].detach().to(torch.get_default_dtype())
    raise NotAllowedError(
        "these arguments of torch.Tensor", "sizes, data or a tensor", "use torch.tensor"
    )


_tensor = of_data(torch.tensor)


def size(values: Any = ()) -> torch.Size:
    """``torch.Size``."""
    check_values(values)
    return torch.Size(values)


def device(*args: Any, **kwargs: Any) -> torch.device:
    """``torch.device``."""
    named = torch.device(*args, **kwargs)
    check_device({"device": named})
    return named


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``, for devices with memory."""
    check_device(kwargs)
    for arg in args:
        if isinstance(arg, (str, torch.device)):
            check_device({"device": arg})
    return tensor.to(*args, **kwargs)


def as_type(tensor: Tensor, dtype: Any = None, **kwargs: Any) -> object:
    """``Tensor.type``, by data types or their old names on the CPU."""
    if (isinstance(dtype, str) and not dtype.startswith("torch.")) or (
        dtype is not None and "sparse" in str(dtype)
    ):
        raise NotAllowedError(f"the type {str(dtype)[:40]!r}", "a torch.dtype")
    return tensor.type(dtype, **kwargs)


def tolist(tensor: Tensor) -> object:
    """``Tensor.tolist``."""
    check_values(tensor)
    return tensor.tolist()


def to_dense(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to_dense``: the size of a sparse tensor may be any number."""
    if tensor.numel() > MAX_ELEMENTS:
        raise too_large(
            f"a dense tensor of {tensor.numel():,} elements", f"at most {MAX_ELEMENTS:,}"
        )
    return tensor.to_dense(*args, **kwargs)


def bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``torch.bincount``: the largest value gives the number of bins."""
    if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex():
        minlength = max(minlength, 0)
        if max(int(tensor.max()), minlength) > MAX_ELEMENTS:
            raise too_large(
                f"{max(int(tensor.max()), minlength):,} bins", f"at most {MAX_ELEMENTS:,}"
            )
    _check_number(minlength)
    return torch.bincount(tensor, weights, minlength)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``: the largest value gives the number of classes."""
    classes = max(num_classes, int(tensor.max()) + 1 if tensor.numel() else 0)
    if tensor.numel() * classes > MAX_ELEMENTS:
        raise too_large(f"{tensor.numel() * classes:,} elements", f"at most {MAX_ELEMENTS:,}")
    return torch.nn.functional.one_hot(tensor, num_classes)


def combinations(tensor: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """``torch.combinations``: torch makes all tuples of ``r`` elements before it chooses."""
    if not 0 <= r <= 64 or max(tensor.numel(), 2) ** r > MAX_ELEMENTS:
        raise too_large(
            f"all choices of {r} of {tensor.numel():,} elements", f"at most {MAX_ELEMENTS:,}"
        )
    return torch.combinations(tensor, r, with_replacement)


def repeat_interleave(tensor: Tensor, repeats: Any = None, dim: int | None = None) -> Tensor:
    """``torch.repeat_interleave``, without ``output_size``, which torch does not check."""
    counts = tensor if repeats is None else repeats
    if isinstance(counts, Tensor):
        if counts.numel() and (
            counts.is_floating_point() or counts.is_complex() or int(counts.min()) < 0
        ):
            raise NotAllowedError("these repeats", "integers from 0 on")
        largest = int(counts.max()) if counts.numel() else 0
        num_elements = largest * max(tensor.numel(), counts.numel())
    else:
        num_elements = int(counts) * tensor.numel()
    if num_elements > MAX_ELEMENTS:
        raise too_large(f"up to {num_elements:,} elements", f"at most {MAX_ELEMENTS:,}")
    if repeats is None:
        return torch.repeat_interleave(tensor)
    return torch.repeat_interleave(tensor, repeats, dim=dim)


def histogram(tensor: Tensor, bins: Any, **kwargs: Any) -> object:
    """``torch.histogram``."""
    check_device(kwargs)
    _check_number(bins)
    return torch.histogram(tensor, bins, **kwargs)


def get_item(tensor: Any, index: Any) -> object:
    """``tensor[index]``: indices that are tensors are broadcast against each other."""
    check_index(tensor, index)
    return tensor[index]


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``."""
    check_index(tensor, index)
    check_values(value if not isinstance(value, Tensor) else None)
    tensor[index] = value


def check_index(value: object, index: object) -> None:
    """Refuse an index that takes long to read, or selects much more than ``value`` has."""
    parts = index if isinstance(index, tuple) else (index,)
    check_values([part for part in parts if not isinstance(part, Tensor)])
    arrays = [part for part in parts if isinstance(part, (Tensor, list))]
    product = value.numel() if isinstance(value, Tensor) else 1
    for part in arrays:
        product *= (part.numel() if isinstance(part, Tensor) else len(part)) or 1
    if not isinstance(value, Tensor) or product <= MAX_ELEMENTS or not arrays:
        return
    if any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts):
        if len(arrays) > 1:
            raise too_large("masks and indices at once", "one of them, for a large tensor")
        return
    check_elements(size_of_index(value, parts))


def index_put(tensor: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """``Tensor.index_put``."""
    check_index(tensor, tuple(indices))
    return tensor.index_put(tuple(indices), values, accumulate)


def index_put_(tensor: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """``Tensor.index_put_``."""
    check_index(tensor, tuple(indices))
    return tensor.index_put_(tuple(indices), values, accumulate)


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """``torch.nn.functional.embedding_bag``: ids and offsets within their bounds."""
    check_bags(input, weight.shape[0], offsets)
    return torch.nn.functional.embedding_bag(input, weight, offsets, *args, **kwargs)


def check_bags(ids: Tensor, num_embeddings: int, offsets: Tensor | None) -> None:
    """Check that ids and offsets are within their bounds, and offsets in ascending order.

    Raises:
        TypeError: for ids that are not integers.
        IndexError: for an id or offset that is out of bounds.
    """
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"got ids of type {ids.dtype}; need integers")
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_embeddings):
        raise IndexError(f"got an id out of {num_embeddings} embeddings")
    if offsets is not None and offsets.numel():
        wrong = (
            int(offsets.min()) < 0
            or int(offsets.max()) > ids.numel()
            or bool((offsets.diff() < 0).any())
        )
        if wrong or offsets.dim() != 1:
            raise IndexError(f"got offsets that do not lead through {ids.numel()} ids in order")


def matrix_power(tensor: Tensor, n: int) -> object:
    """``torch.matrix_power``."""
    if isinstance(n, int) and abs(n) > MAX_ELEMENTS:
        raise too_large(f"the power {n:,}", f"at most {MAX_ELEMENTS:,}")
    return torch.linalg.matrix_power(tensor, n)


def finite(function: Function) -> Function:
    """A function of a matrix that would crash the process for some infinities or NaNs."""

    @functools.wraps(function)
    def checked(tensor: Tensor) -> object:
        if not bool(torch.isfinite(tensor).all()):
            raise NotAllowedError("a matrix with infinities or NaNs", "a finite one")
        return function(tensor)

    return checked


def unfold(tensor: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """``Tensor.unfold``: a view, in which elements occur many times."""
    check_elements(unfold_view_size((tensor, dimension, size, step), {}))
    return tensor.unfold(dimension, size, step)


def _check_number(number: object) -> None:
    if isinstance(number, int) and number > MAX_ELEMENTS:
        raise too_large(f"{number:,} as a size", f"at most {MAX_ELEMENTS:,}")


FUNCTIONS: dict[str, Function] = {
    "as_tensor": of_data(torch.as_tensor),
    "tensor": _tensor,
    "bincount": bincount,
    "combinations": combinations,
    "device": device,
    "div": division(torch.div),
    "divide": division(torch.divide),
    "empty": zeros,
    "empty_like": zeros_like,
    "histogram": histogram,
    "matrix_power": matrix_power,
    "repeat_interleave": repeat_interleave,
    "Size": size,
    "Tensor": legacy_tensor,
}
METHODS: dict[str, Function] = {
    "bincount": bincount,
    "div": division(torch.Tensor.div),
    "div_": division(torch.Tensor.div_),
    "divide": division(torch.Tensor.divide),
    "divide_": division(torch.Tensor.divide_),
    "histogram": histogram,
    "index_put": index_put,
    "index_put_": index_put_,
    "matrix_power": matrix_power,
    "new_empty": new_zeros,
    "new_tensor": of_data(torch.Tensor.new_tensor),
    "repeat_interleave": repeat_interleave,
    "to": to,
    "to_dense": to_dense,
    "tolist": tolist,
    "type": as_type,
    "unfold": unfold,
    "__getitem__": get_item,
    "__setitem__": set_item,
}
FUNCTIONAL: dict[str, Function] = {"embedding_bag": embedding_bag, "one_hot": one_hot}
LINALG: dict[str, Function] = {
    "eig": finite(torch.linalg.eig),
    "eigvals": finite(torch.linalg.eigvals),
    "matrix_power": matrix_power,
}
for _name in str.split("""
    __add__ __and__ __eq__ __floordiv__ __ge__ __gt__ __le__ __lt__ __matmul__ __mod__ __mul__
    __ne__ __or__ __pow__ __radd__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ __xor__
"""):
    METHODS[_name] = broadcasting(
        getattr(torch.Tensor, _name), SIZES["matmul"] if _name == "__matmul__" else None
    )
