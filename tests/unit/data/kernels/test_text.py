import csv
import io
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.data.kernels.text import (
    EMPTY_CODE,
    NOT_CLOSED,
    RECORD_ITEMS,
    TEXT_AFTER_QUOTE,
    complete_records_end,
    find_fields,
    hash_fields,
    hash_integers,
    numbers_of_integers,
    parse_numbers,
    split_items,
)

FIELD = st.text(st.sampled_from('ab1 ,"\n\té'), max_size=6)
RECORDS = st.lists(st.lists(FIELD, min_size=3, max_size=3), min_size=1, max_size=5)


def fields_of(text: bytes, columns: int = 3, separator: str = ",", quotes: bool = True):
    """All fields of all records, and the table of records."""
    buffer = np.frombuffer(text, np.uint8).copy()
    capacity = text.count(b"\n") + 1
    bounds = np.zeros((capacity, columns, 2), np.int64)
    records = np.zeros((capacity, RECORD_ITEMS), np.int64)
    count = find_fields(buffer, ord(separator), quotes, np.arange(columns), bounds, records)
    return [[buffer[a:b].tobytes() for a, b in bounds[i]] for i in range(count)], records[:count]


def packed(texts: list[bytes]):
    ends = np.cumsum([len(text) for text in texts])
    return np.frombuffer(b"".join(texts) + b"?", np.uint8), np.concatenate([[0], ends[:-1]]), ends


def reference_hash(data: bytes) -> int:
    code = 0xCBF29CE484222325
    mask = 2**64 - 1
    for byte in data:
        code = (code ^ byte) * 0x100000001B3 & mask
    code = (code ^ code >> 33) * 0xFF51AFD7ED558CCD & mask
    code = (code ^ code >> 33) * 0xC4CEB9FE1A85EC53 & mask
    return code ^ code >> 33


@settings(deadline=None)
@given(RECORDS, st.sampled_from(["\n", "\r\n"]))
def test_reads_what_the_csv_module_writes(records, newline):
    text = io.StringIO()
    csv.writer(text, lineterminator=newline, quoting=csv.QUOTE_ALL).writerows(records)
    data = text.getvalue().encode()
    result, table = fields_of(data)
    assert result == [[field.encode() for field in record] for record in records]
    assert (table[:, 2] == 3).all()
    assert complete_records_end(np.frombuffer(data, np.uint8), ord(",")) == len(data)
    assert fields_of(data[: -len(newline)])[0] == result


@settings(deadline=None)
@given(RECORDS, st.data())
def test_a_cut_falls_between_records(records, data):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(records)
    whole = text.getvalue().encode()
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    end = complete_records_end(np.frombuffer(cut, np.uint8), ord(","))
    assert fields_of(cut[:end])[0] == fields_of(whole)[0][: len(fields_of(cut[:end])[0])]
    assert end == 0 or fields_of(cut[:end])[0] + fields_of(whole[end:])[0] == fields_of(whole)[0]


def test_line_numbers_columns_and_blank_lines():
    result, records = fields_of(b'a,b,c\n\n"x\ny",2,3,4\r\n,,\n5')
    assert result == [[b"a", b"b", b"c"], [b"x\ny", b"2", b"3"], [b"", b"", b""], [b"5", b"", b""]]
    assert records[:, 2].tolist() == [3, 4, 3, 1]
    assert records[:, 3].tolist() == [0, 2, 4, 5]


def test_what_is_wrong_with_the_quotes_of_a_record():
    text = b'1,"a\nb",c\n"x" ,"y"z,"u\nv" \r\n2,"a\nb"c,d\n3,"e\n4,f\n'
    result, records = fields_of(text)
    assert result[:2] == [[b"1", b"a\nb", b"c"], [b"x ", b"yz", b"u\nv "]]
    assert records[:, 3:].tolist() == [
        [0, 2, 0],
        [2, 2, 0],
        [4, 2, TEXT_AFTER_QUOTE],
        [6, 3, NOT_CLOSED],
    ]


@settings(deadline=None)
@given(st.lists(st.sampled_from([b'"', b",", b"\n", b"a", b" "]), max_size=30))
def test_both_kernels_see_the_same_records(parts):
    """Wherever quotes stand, a cut falls where a record ends."""
    text = b"".join(parts)
    end = complete_records_end(np.frombuffer(text, np.uint8), ord(","))
    result, _ = fields_of(text)
    before, records_before = fields_of(text[:end])
    assert before == result[: len(before)]
    assert (records_before[:, 5] != NOT_CLOSED).all()
    assert len(result) - len(before) <= 1


def test_quotes_are_ordinary_where_they_have_no_meaning():
    assert fields_of(b'"a\tb"\tc\n', separator="\t", quotes=False)[0] == [[b'"a', b'b"', b"c"]]
    assert fields_of(b'a"b,5" pipe,""\n')[0] == [[b'a"b', b'5" pipe', b""]]
    assert complete_records_end(np.frombuffer(b'5" pipe,a\nb', np.uint8), ord(",")) == 10


def test_hash_is_the_documented_one():
    texts = [b"", b"a", b"68fd1e64", "é".encode(), bytes(range(256))]
    codes = hash_fields(*packed(texts))
    assert codes.tolist() == [reference_hash(text) for text in texts]
    assert codes[0] == EMPTY_CODE


LONGS = [0, 7, -7, 10, 10**17, 10**18 - 1, 10**18, 10**18 + 9, -(10**18) - 9, 2**63 - 1, -(2**63)]


def check_integers(numbers):
    """They mean what their texts mean; a missing one is the empty text."""
    values = np.array([*numbers, 0], np.int64)
    is_missing = np.arange(len(values)) == len(numbers)
    fields = packed([*(str(number).encode() for number in numbers), b""])
    assert hash_integers(values, is_missing).tolist() == hash_fields(*fields).tolist()
    read, _ = parse_numbers(*fields)
    assert numbers_of_integers(values, is_missing).tobytes() == read.tobytes()


def test_integers_are_the_documented_texts():
    check_integers(LONGS)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_integers_are_their_texts(numbers):
    check_integers(numbers)


def test_hash_spreads_over_few_buckets():
    codes = hash_fields(*packed([f"{i:08x}".encode() for i in range(20_000)]))
    counts = np.bincount((codes % np.uint64(16)).astype(int), minlength=16)
    assert counts.max() < 1.15 * counts.mean()
    assert len(np.unique(codes)) == 20_000


@settings(deadline=None)
@given(st.lists(st.text("ab|", max_size=8), min_size=1, max_size=5))
def test_items_are_split_as_python_splits(texts):
    buffer, starts, ends = packed([text.encode() for text in texts])
    lengths, item_starts, item_ends = split_items(buffer, starts, ends, ord("|"), False)
    expected = [text.split("|") if text else [] for text in texts]
    assert lengths.tolist() == [len(items) for items in expected]
    items = [buffer[a:b].tobytes().decode() for a, b in zip(item_starts, item_ends, strict=True)]
    assert items == [item for items in expected for item in items]


def test_ended_items_tell_an_empty_one_from_none():
    buffer, starts, ends = packed([b"a|b\x1f", b"\x1f", b"", b"\x1fc\x1f"])
    lengths, item_starts, item_ends = split_items(buffer, starts, ends, 0x1F, True)
    assert lengths.tolist() == [1, 1, 0, 2]
    items = [buffer[a:b].tobytes() for a, b in zip(item_starts, item_ends, strict=True)]
    assert items == [b"a|b", b"", b"", b"c"]


def parsed(text: str) -> tuple[float, bool]:
    values, good = parse_numbers(*packed([text.encode()]))
    return float(values[0]), bool(good[0])


@settings(deadline=None)
@given(st.one_of(st.integers(-(10**15), 10**15), st.decimals(-(10**8), 10**8, places=6)))
def test_ordinary_numbers_are_read_exactly(number):
    assert parsed(str(number)) == (float(str(number)), True)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_all_floats_are_read_closely(number):
    value, good = parsed(repr(number))
    assert good
    assert math.isclose(value, number, rel_tol=1e-14, abs_tol=1e-300)


@pytest.mark.parametrize(
    "text",
    [
        "nan",
        "NaN",
        "inf",
        "-inf",
        "1e999",
        "x",
        "-",
        "+",
        ".",
        "1.2.3",
        "1e",
        "1e+",
        "0x1",
        "1_0",
        "1 2",
    ],
)
def test_what_is_no_finite_number_is_refused(text):
    assert not parsed(text)[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [(" 7 ", 7.0), ("+.5", 0.5), ("5.", 5.0), ("-2E-2", -0.02), ("1" * 30, 1.1111111111111112e29)],
)
def test_other_spellings_of_numbers(text, value):
    assert parsed(text)[0] == pytest.approx(value, rel=1e-14)


def test_empty_is_missing_and_good():
    assert math.isnan(parsed("")[0])
    assert parsed("")[1]


def test_the_same_without_compilation():
    """The kernels as plain Python: what is compiled means the same."""
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        pytest.skip("already without compilation")
    chosen = (
        "line_numbers or documented or ordinary_where or empty or other_spellings or refused or"
        " quotes_of_a_record"
    )
    wraps = ["-W", "ignore:overflow:RuntimeWarning"]  # as a hash of 64 bits is meant to
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *wraps,
        __file__,
        "-k",
        chosen,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]
