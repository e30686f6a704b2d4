"""Builtins and operators that peers may name, with checks so that none holds the GIL for long.

Code in C does not release the GIL: ``pow(7, 10**8)`` or ``sum(range(10**12))`` would stop the whole
worker.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from pibroch.errors import NotAllowedError
from pibroch.rpc.values.checks import MAX_ELEMENTS, Function, broadcasting, check_values, too_large
from pibroch.rpc.values.forms import MAX_BIG_INT_BYTES, check_hashes
from pibroch.rpc.values.special_checks import get_item

MAX_BITS = 8 * MAX_BIG_INT_BYTES
MAX_TEXT = 1 << 16
MAX_COPIES = 1 << 24  # items or bytes that a repetition may give
_MAX_BASE_BITS = 4096  # of the numbers in a power modulo another number
_MAX_DECIMALS = 1000
_ENCODINGS = ("utf-8", "utf8", "ascii", "latin-1", "latin1")
_SEQUENCES = (str, bytes, bytearray, list, tuple)

_FREE = str.split("abs bool divmod len repr range")
_FREE_OPERATORS = str.split("""
    abs concat index inv invert is_ is_not neg not_ pos truth
""")
_BROADCASTING = str.split("""
    add and_ eq floordiv ge gt le lt matmul ne or_ rshift sub truediv xor
""")


def builtin_functions() -> Iterator[tuple[str, object, Function]]:
    """Of each builtin: its name, the function, and its checked form."""
    for name in _FREE:
        yield name, getattr(builtins, name), getattr(builtins, name)
    for name in ("all", "any", "list", "tuple", "sorted", "min", "max"):
        yield name, getattr(builtins, name), _taking_apart(getattr(builtins, name))
    for name, checked in _BUILTINS.items():
        yield name, getattr(builtins, name), checked


def operators() -> Iterator[tuple[str, object, Function]]:
    """The same for the module ``operator``."""
    for name in _FREE_OPERATORS:
        yield name, getattr(operator, name), getattr(operator, name)
    for name in _BROADCASTING:
        yield name, getattr(operator, name), broadcasting(_for_arrays(getattr(operator, name)))
    for name, checked in _OPERATORS.items():
        yield name, getattr(operator, name), checked


def _index(value: Any) -> int | None:
    """A value as an integer, also a tensor of one element or a number of NumPy; else ``None``."""
    try:
        return operator.index(value)
    except Exception:  # not an integer
        return None


def _taking_apart(function: Function) -> Function:
    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        check_values(*args)
        if "key" in kwargs:
            raise NotAllowedError("a key", "none", "let a function of your own do it")
        return function(*args, **kwargs)

    return checked


def _for_arrays(function: Function) -> Function:
    """Check arrays of different shapes, which are broadcast against each other."""

    @functools.wraps(function)
    def checked(a: object, b: object) -> object:
        if (
            isinstance(a, np.ndarray)
            and isinstance(b, np.ndarray)
            and a.shape != b.shape
            and a.size * b.size > MAX_ELEMENTS
        ):
            raise too_large(
                f"arrays of {a.size:,} and {b.size:,} elements and different shapes", "smaller ones"
            )
        return function(a, b)

    return checked


def _sum(items: Any, start: Any = 0) -> object:
    check_values(items)
    if isinstance(start, _SEQUENCES):
        raise NotAllowedError("a sum of sequences", "one of numbers or tensors")
    return sum(items, start)


def _set(items: object = ()) -> set[Any]:
    return set(_hashed(items))


def _frozenset(items: object = ()) -> frozenset[Any]:
    return frozenset(_hashed(items))


def _hashed(items: Any) -> Any:
    check_values(items)
    return (
        items if isinstance(items, (set, frozenset, dict, str, bytes)) else check_hashes([*items])
    )


def _dict(items: Any = (), **kwargs: object) -> dict[Any, Any]:
    if not isinstance(items, dict):
        check_values(items)
        items = [*items]
        check_hashes([pair[0] for pair in items])
    return dict(items, **kwargs)


def _bytes(value: Any = b"", encoding: str = "", errors: str = "strict") -> bytes:
    if isinstance(value, str):
        return bytes(value, _encoding(encoding), errors)
    number = _index(value)
    if number is not None and number > MAX_COPIES:
        raise too_large(f"{number:,} bytes", f"at most {MAX_COPIES:,}")
    check_values(value)
    return bytes(value)


def _str(value: Any = "", encoding: str = "", errors: str = "strict") -> str:
    return str(value, _encoding(encoding), errors) if encoding else str(value)


def _encoding(name: str) -> str:
    if name not in _ENCODINGS:
        raise NotAllowedError(f"encoding {name[:40]!r}", f"one of {', '.join(_ENCODINGS)}")
    return name


def _of_text(function: Function) -> Function:
    @functools.wraps(function)
    def checked(*args: object) -> object:
        for arg in args:
            if isinstance(arg, (str, bytes, bytearray)) and len(arg) > MAX_TEXT:
                raise too_large(f"a number of {len(arg):,} letters", f"at most {MAX_TEXT:,}")
        return function(*args)

    return checked


def _round(number: Any, ndigits: Any = None) -> Any:
    digits = _index(ndigits)
    if isinstance(number, int) and digits is not None and digits < -_MAX_DECIMALS:
        raise too_large(f"{-digits:,} digits to round", f"at most {_MAX_DECIMALS:,}")
    return round(number) if ndigits is None else round(number, ndigits)


def _pow(base: Any, exp: Any, mod: Any = None) -> Any:
    if isinstance(base, int) and isinstance(exp, int):
        _check_power(base, exp, mod)
    if mod is not None:
        return pow(base, exp, mod)
    return _raised(base, exp)


def _operator_pow(base: object, exp: object) -> object:
    return _pow(base, exp)


_raised = broadcasting(_for_arrays(operator.pow))


def _check_power(base: int, exp: int, mod: Any) -> None:
    if mod is None and exp > 0 and base.bit_length() * exp > MAX_BITS and abs(base) > 1:
        raise too_large(f"a power of {base.bit_length() * exp:,} bits", f"at most {MAX_BITS:,}")
    if mod is not None and max(each.bit_length() for each in (base, exp, mod)) > _MAX_BASE_BITS:
        raise too_large(
            "a power of large numbers modulo another one", f"at most {_MAX_BASE_BITS:,} bits"
        )


def _lshift(number: object, by: object) -> object:
    if isinstance(number, int) and isinstance(by, int) and by + number.bit_length() > MAX_BITS:
        raise too_large(f"a number of {by + number.bit_length():,} bits", f"at most {MAX_BITS:,}")
    return _shifted(number, by)


_shifted = broadcasting(_for_arrays(operator.lshift))


def _mul(a: Any, b: Any) -> object:
    for sequence, times in ((a, b), (b, a)):
        number = _index(times) if isinstance(sequence, _SEQUENCES) else None
        if number is not None and len(sequence) * number > MAX_COPIES:
            raise too_large(f"{len(sequence) * number:,} items", f"at most {MAX_COPIES:,}")
    return _multiplied(a, b)


_multiplied = broadcasting(_for_arrays(operator.mul))


def _mod(a: object, b: object) -> object:
    if isinstance(a, (str, bytes, bytearray)):
        raise NotAllowedError(
            "text to be formatted", "numbers or tensors", "format it in a function of your own"
        )
    return _remainder(a, b)


_remainder = broadcasting(_for_arrays(operator.mod))


def _contains(container: Any, item: Any) -> bool:
    if isinstance(container, range) and type(item) is not int:
        check_values(container)
    return operator.contains(container, item)


def _getitem(value: object, index: object) -> object:
    if isinstance(value, np.ndarray):
        parts = index if isinstance(index, tuple) else (index,)
        check_values(*parts)
        sizes = [np.size(part) for part in parts if isinstance(part, (np.ndarray, list))]
        if len(sizes) > 1 and value.size * functools.reduce(operator.mul, sizes) > MAX_ELEMENTS:
            raise too_large("an index of many arrays", "a smaller one")
    return get_item(value, index)


_BUILTINS: dict[str, Function] = {
    "bytes": _bytes,
    "complex": _of_text(complex),
    "dict": _dict,
    "float": _of_text(float),
    "frozenset": _frozenset,
    "int": _of_text(int),
    "pow": _pow,
    "round": _round,
    "set": _set,
    "str": _str,
    "sum": _sum,
}
_OPERATORS: dict[str, Function] = {
    "contains": _contains,
    "countOf": _taking_apart(operator.countOf),
    "getitem": _getitem,
    "indexOf": _taking_apart(operator.indexOf),
    "lshift": _lshift,
    "mod": _mod,
    "mul": _mul,
    "pow": _operator_pow,
}
