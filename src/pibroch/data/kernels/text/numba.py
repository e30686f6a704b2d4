"""Kernels over raw text: find the fields of delimited lines, hash them, read numbers from them.

Text is uint8; a field is ``[start, end)`` in it. R records, W wanted columns. The same kernels
serve preparation and serving, so a value has one code for ever: 64-bit FNV-1a of its bytes,
finished with murmur3's mixing so that every bit depends on every byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

EMPTY_CODE = np.uint64(17280346270528514342)
"""The code of an empty field."""
NEWLINE = 10
RETURN = 13
QUOTE = 34
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_MAX_MANTISSA = 10**17
_LONGEST_EXACT = 10**18
_LIST, _LIST_END, _OBJECT, _OBJECT_END, _COMMA, _BACKSLASH = b"[]{},\\"
_FIELD_START, _PLAIN, _QUOTED, _QUOTE_SEEN = range(4)

RECORD_ITEMS = 6
"""Numbers that :func:`find_fields` gives for each record."""
NOT_CLOSED = 1
TEXT_AFTER_QUOTE = 2
"""What may be wrong with a record's quotes."""


@kernel
def complete_records_end(text: Bytes, separator: int) -> int:
    """End of the last complete record of quoted text, 0 when there is none.

    A newline inside quotes ends nothing.

    Reads quotes as :func:`find_fields` does, so that both see the same records.
    """
    end = 0
    state = _FIELD_START
    for position in range(len(text)):
        byte = text[position]
        if state == _QUOTED:
            if byte == QUOTE:
                state = _QUOTE_SEEN
        elif byte == QUOTE and state != _PLAIN:
            state = _QUOTED  # opens a field, or is the second of a doubled quote
        elif byte in (separator, NEWLINE):
            state = _FIELD_START
            if byte == NEWLINE:
                end = position + 1
        else:
            state = _PLAIN
    return end


@kernel
def find_fields(
    text: Bytes,
    separator: int,
    quotes: bool,
    wanted: Positions,
    bounds: Positions,
    records: Positions,
) -> int:
    """Find the wanted fields of each record; quoted fields are unescaped in place.

    Blank lines are skipped.

    Ends early where the results have no room for more records.

    Args:
        text: whole records; the last may lack its newline. Changed where a field is quoted.
        separator: byte between columns.
        quotes: whether a field may stand in double quotes.
        wanted: for each column of the file its place among the wanted ones or -1, int64 ``[C]``.
        bounds: out, starts and ends, ``[R, W, 2]``.
        records: out, per record its first byte, one past its last byte, its number of columns, its
            first line, its number of lines, and what is wrong with its quotes: 0 for nothing,
            ``NOT_CLOSED`` before the text ends, or ``TEXT_AFTER_QUOTE`` of a field with newlines;
            ``[R, 6]``.

    Returns:
        The number of records.
    """
    position = 0
    line = 0
    record = 0
    while position < len(text) and record < len(records):
        first = position
        first_line = line
        column = 0
        problem = 0
        while True:
            start = position
            if quotes and position < len(text) and text[position] == QUOTE:
                end, position, line, quote_problem = _quoted_field(text, position, separator, line)
                problem = problem or quote_problem
            else:
                while (
                    position < len(text)
                    and text[position] != separator
                    and text[position] != NEWLINE
                ):
                    position += 1
                end = position
            is_last = position >= len(text) or text[position] == NEWLINE
            if is_last and end == position and end > start and text[end - 1] == RETURN:
                end -= 1
            if column < len(wanted) and wanted[column] >= 0:
                bounds[record, wanted[column], 0] = start
                bounds[record, wanted[column], 1] = end
            column += 1
            if is_last:
                break
            position += 1
        if column > 1 or end > start:
            records[record, 0] = first
            records[record, 1] = position
            records[record, 2] = column
            records[record, 3] = first_line
            records[record, 4] = line - first_line + 1
            records[record, 5] = problem
            record += 1
        position += 1
        line += 1
    return record


@kernel
def _quoted_field(
    text: Bytes, position: int, separator: int, line: int
) -> tuple[int, int, int, int]:
    """Unescape the quoted field that opens at ``position``.

    Returns:
        The field's end, where reading goes on, the line there, and what is wrong with the quotes.
    """
    out = position
    quoted = True
    first_line = line
    problem = 0
    position += 1
    while position < len(text):
        byte = text[position]
        if quoted and byte == QUOTE:
            if position + 1 < len(text) and text[position + 1] == QUOTE:
                position += 1  # a doubled quote stands for one
            else:
                quoted = False
                position += 1
                continue
        elif not quoted and byte in (separator, NEWLINE):
            break
        elif not quoted and line > first_line and byte not in (32, RETURN):
            problem = TEXT_AFTER_QUOTE
        line += byte == NEWLINE
        text[out] = byte
        out += 1
        position += 1
    if out > 0 and not quoted and text[out - 1] == RETURN and text[position - 1] == RETURN:
        out -= 1
    return out, position, line, (NOT_CLOSED if quoted else problem)


@kernel
def hash_fields(text: Bytes, starts: Positions, ends: Positions) -> NDArray[np.uint64]:
    """The 64-bit code of each field, uint64 ``[R]``.

    >>> hash_fields(np.frombuffer(b"ab", np.uint8), np.array([0, 1]), np.array([2, 1])).tolist()
    [15740586271646006756, 17280346270528514342]
    """
    codes = np.empty(len(starts), np.uint64)
    for record in range(len(starts)):
        code = _FNV_OFFSET
        for position in range(starts[record], ends[record]):
            code = (code ^ np.uint64(text[position])) * _FNV_PRIME
        code = (code ^ (code >> _SHIFT)) * _MIX_1
        code = (code ^ (code >> _SHIFT)) * _MIX_2
        codes[record] = code ^ (code >> _SHIFT)
    return codes


@kernel
def hash_integers(values: NDArray[np.int64], is_missing: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """The codes of integers ``[R]``, those of their decimal texts; missing ones are empty.

    >>> hash_integers(np.array([-12, 0]), np.array([False, True])).tolist()
    [1886727270008260528, 17280346270528514342]
    """
    codes = np.empty(len(values), np.uint64)
    digits = np.empty(20, np.uint64)
    for record in range(len(values)):
        code = _FNV_OFFSET
        if not is_missing[record]:
            value = values[record]
            left = np.uint64(value)
            if value < 0:
                code = (code ^ np.uint64(45)) * _FNV_PRIME
                left = ~left + np.uint64(1)
            count = 0
            while count == 0 or left > np.uint64(0):
                above = left // np.uint64(10)
                digits[count] = left - above * np.uint64(10) + np.uint64(48)
                count += 1
                left = above
            for place in range(count - 1, -1, -1):
                code = (code ^ digits[place]) * _FNV_PRIME
        code = (code ^ (code >> _SHIFT)) * _MIX_1
        code = (code ^ (code >> _SHIFT)) * _MIX_2
        codes[record] = code ^ (code >> _SHIFT)
    return codes


@kernel
def numbers_of_integers(
    values: NDArray[np.int64], is_missing: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """What :func:`parse_numbers` reads in the decimal texts of integers ``[R]``; missing is NaN.

    The nearest float64 of up to 18 digits. Of 19 the last one is read as 0, as there.

    >>> numbers_of_integers(np.array([7, 0]), np.array([False, True])).tolist()
    [7.0, nan]
    """
    numbers = np.empty(len(values), np.float64)
    for record in range(len(values)):
        value = values[record]
        if is_missing[record]:
            numbers[record] = np.nan
        elif -_LONGEST_EXACT < value < _LONGEST_EXACT:
            numbers[record] = np.float64(value)
        else:
            tens = value // 10 if value > 0 else -(value // -10)
            numbers[record] = np.float64(tens) * 10.0
    return numbers


@kernel
def cut_characters(
    text: Bytes, starts: Positions, ends: Positions, first: int, end: int
) -> tuple[Positions, Positions]:
    """Starts and ends of characters ``first`` to ``end`` of each field; fewer of a shorter field.

    A byte that does not continue a character of UTF-8 begins one, so that no text is refused.
    """
    new_starts = ends.copy()
    new_ends = ends.copy()
    for record in range(len(starts)):
        count = -1
        for position in range(starts[record], ends[record]):
            count += text[position] & 0xC0 != 0x80 or count < 0
            if count == end:
                new_ends[record] = position
                break
            if count == first and new_starts[record] == ends[record]:
                new_starts[record] = position
    return new_starts, new_ends


@kernel
def split_items(
    text: Bytes, starts: Positions, ends: Positions, delimiter: int, ended: bool
) -> tuple[Any, Any, Any]:
    """Split fields into items: items per field ``[R]``, starts and ends of all items ``[V]``.

    Args:
        text: holds the fields.
        starts: of the fields.
        ends: of the fields.
        delimiter: stands between the items of a field; an empty field has none.
        ended: the delimiter stands after each item instead, so that one empty item differs from
            none.
    """
    total = 0
    lengths = np.zeros(len(starts), np.int64)
    for record in range(len(starts)):
        lengths[record] = not ended and ends[record] > starts[record]
        for position in range(starts[record], ends[record]):
            lengths[record] += text[position] == delimiter
        total += lengths[record]
    item_starts = np.empty(total, np.int64)
    item_ends = np.empty(total, np.int64)
    item = 0
    for record in range(len(starts)):
        first = starts[record]
        for position in range(starts[record], ends[record]):
            if text[position] == delimiter:
                item_starts[item] = first
                item_ends[item] = position
                item += 1
                first = position + 1
        if not ended and ends[record] > starts[record]:
            item_starts[item] = first
            item_ends[item] = ends[record]
            item += 1
    return lengths, item_starts, item_ends


@kernel
def parse_numbers(
    text: Bytes, starts: Positions, ends: Positions
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Read decimal numbers: values ``[R]``, and whether each is finite or empty ``[R]``.

    An empty field is NaN.

    Exact (correctly rounded) for up to 15 digits and exponents up to 22.
    """
    values = np.empty(len(starts), np.float64)
    good = np.empty(len(starts), np.bool_)
    for record in range(len(starts)):
        start = starts[record]
        end = ends[record]
        while start < end and text[start] == 32:
            start += 1
        while end > start and text[end - 1] == 32:
            end -= 1
        if start == end:
            values[record] = np.nan
            good[record] = True
        else:
            values[record], good[record] = _number(text, start, end)
    return values, good


@kernel
def _number(text: Bytes, start: int, end: int) -> tuple[float, bool]:
    """The number ``[+-]digits[.digits][e[+-]digits]``, and whether the text is one."""
    position = start
    negative = text[start] == 45
    if text[start] == 45 or text[start] == 43:
        position += 1
    mantissa = 0
    exponent = 0
    digits = 0
    after_point = False
    while position < end:
        byte = text[position]
        if byte == 46 and not after_point:
            after_point = True
        elif 48 <= byte <= 57:
            digits += 1
            if mantissa < _MAX_MANTISSA:
                mantissa = mantissa * 10 + (int(byte) - 48)
                exponent -= after_point
            else:
                exponent += not after_point
        else:
            break
        position += 1
    if digits == 0:
        return 0.0, False
    if position < end:
        shift, good = _exponent(text, position, end)
        if not good:
            return 0.0, False
        exponent += shift
    value = _scaled(np.float64(mantissa), exponent)
    return (-value if negative else value), np.isfinite(value)


@kernel
def _exponent(text: Bytes, position: int, end: int) -> tuple[int, bool]:
    if text[position] != 101 and text[position] != 69:
        return 0, False
    position += 1
    negative = position < end and text[position] == 45
    if position < end and (text[position] == 45 or text[position] == 43):
        position += 1
    if position == end:
        return 0, False
    value = 0
    for place in range(position, end):
        if text[place] < 48 or text[place] > 57:
            return 0, False
        value = min(value * 10 + (int(text[place]) - 48), 100_000)
    return (-value if negative else value), True


@kernel
def _scaled(mantissa: float, exponent: int) -> float:
    while exponent > 22 and np.isfinite(mantissa) and mantissa != 0:
        mantissa *= 1e22
        exponent -= 22
    while exponent < -22 and mantissa != 0:
        mantissa /= 1e22
        exponent += 22
    scale = 1.0
    for _ in range(min(abs(exponent), 22)):
        scale *= 10.0
    return mantissa * scale if exponent >= 0 else mantissa / scale


@kernel
def count_json(text: Bytes) -> tuple[int, int]:
    """Items of the longest outermost list (at least 1), and the number of lists and objects.

    In ``[{"a": [1, 2]}, {}]`` that is the list of two rows, in ``{"columns": {"a": [[1], [],
    [2]]}}`` the one of three values. Whatever is no JSON has some numbers, too.

    >>> count_json(np.frombuffer(b'{"columns": {"a": [[1], [], ["],"]]}}', np.uint8))
    (3, 6)
    """
    longest = 0
    num_nested = 0
    depth = 0
    commas = 0
    position = 0
    in_text = False
    while position < len(text):
        byte = text[position]
        if in_text:
            position += byte == _BACKSLASH
            in_text = byte != QUOTE
        elif byte == QUOTE:
            in_text = True
        elif byte == _COMMA:
            commas += depth == 1
        elif byte in (_LIST, _OBJECT):
            num_nested += 1
            if depth == 0:
                commas = 0
            depth += depth > 0 or byte == _LIST
        elif byte in (_LIST_END, _OBJECT_END):
            if depth == 1:
                longest = max(longest, commas + 1)
            depth = max(0, depth - 1)
        position += 1
    return longest, num_nested
