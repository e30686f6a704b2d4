"""From a single value to its text: the one function that every reader of typed values uses.

A Parquet column becomes text by the expressions of :mod:`pibroch.data.parquet`, which give the
same. The table of types is in ``docs/data.md``.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np

TEXT_RULES: Final = 2
"""The version of these rules.

Version 1 wrote 12.0 as ``12.0`` and NaN as ``NaN``; see ``Schema.text_rules``.
"""
_POINT_PLACES = 5
"""A number below 1e-5 has an exponent."""
NO_TEXT = (TypeError, ValueError, OverflowError)
"""What :func:`text_of` raises."""
_NO_LIST = (str, bytes, bytearray, memoryview, Mapping)


def text_of(value: object, rules: int = TEXT_RULES) -> bytes:
    """A single value as a text file would hold it.

    Bytes are such a text, ``None`` and NaN are empty.

    Raises:
        TypeError: for what is no single value.
        ValueError: for what cannot be written as UTF-8.
        OverflowError: for a moment that UTC has no date for.

    >>> text_of(True), text_of(12.0), text_of(3.9e-7), text_of(datetime.date(2024, 5, 6))
    (b'1', b'12', b'3.9e-7', b'2024-05-06')
    """
    kind = type(value)
    if kind is float:
        return _of_float(value, rules)
    write = _WRITERS.get(kind)
    return _of_other(value, rules) if write is None else write(value)


def is_list(value: object) -> bool:
    """Whether a value is a list, a tuple, a set, a one-dimensional array or tensor, or the like."""
    if isinstance(value, (list, tuple)):
        return True
    return (
        isinstance(value, Collection)
        and not isinstance(value, _NO_LIST)
        and getattr(value, "ndim", 1) != 0
    )


def _of_float(value: Any, rules: int) -> bytes:
    """The shortest decimal form that reads back to the same number, written as polars does."""
    if value != value:
        return b"" if rules > 1 else b"NaN"
    text = float.__repr__(value)
    if "e-0" in text:
        digits, _, places = text.partition("e-0")
        if int(places) <= _POINT_PLACES:
            sign, digits = ("-", digits[1:]) if value < 0 else ("", digits)
            text = f"{sign}0.{'0' * (int(places) - 1)}{digits.replace('.', '')}"
        else:
            text = f"{digits}e-{places}"
    elif rules > 1:
        text = text.removesuffix(".0")
        text = "0" if text == "-0" else text
    return text.encode()


def _of_other(value: Any, rules: int) -> bytes:
    """A value of a rarer type, or of one derived from a usual type."""
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    if isinstance(value, float):
        return _of_float(value, rules)
    if isinstance(value, np.datetime64):
        return _of_datetime64(value)
    if isinstance(value, np.floating):
        return _of_float(float(value), rules)
    if type(value).__name__ == "NAType":  # pandas' missing value
        return b""
    if getattr(value, "ndim", None) == 0 and not isinstance(value, np.timedelta64):
        item = value.item()  # of NumPy's scalars, and of arrays and tensors without a dimension
        if type(item) is not type(value):
            return text_of(item, rules)
    raise TypeError("a list" if is_list(value) else f"a {type(value).__name__}")


def _of_integer(value: Any) -> bytes:
    return int.__repr__(value).encode()


def _of_decimal(value: decimal.Decimal) -> bytes:
    if value.is_nan():
        return b""
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return b"0" if text == "-0" else text.encode()


def _of_datetime(value: datetime.datetime) -> bytes:
    if value != value:  # pandas' missing time
        return b""
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC)
    return value.isoformat().encode()


def _of_date(value: datetime.date | datetime.time) -> bytes:
    return value.isoformat().encode()


def _of_datetime64(value: np.datetime64) -> bytes:
    if np.isnat(value):
        return b""
    unit = np.datetime_data(value)[0]
    if unit in ("Y", "M", "W", "D"):
        return str(value.astype("M8[D]")).encode()
    whole, _, fraction = str(value.astype("M8[s]") if unit in "hm" else value).partition(".")
    fraction = fraction.rstrip("0")
    places = next(count for count in (0, 6, 9, 18) if len(fraction) <= count)
    return f"{whole}.{fraction:0<{places}}".rstrip(".").encode()


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    str: str.encode,
    bytes: bytes,
    type(None): lambda _: b"",
    bool: lambda value: b"1" if value else b"0",
    int: _of_integer,
    bytearray: bytes,
    memoryview: bytes,
    datetime.datetime: _of_datetime,
    datetime.date: _of_date,
    datetime.time: _of_date,
    decimal.Decimal: _of_decimal,
}
"""By type, a type before those that it is derived from.

A truth value is an integer, a moment a day.
"""
