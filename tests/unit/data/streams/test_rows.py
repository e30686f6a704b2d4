"""Parquet by columns: the samples, the bad rows and the reasons of the same rows as text."""

import datetime
import zlib

import numpy as np
import polars as pl
import pytest

from pibroch.data.kernels.text import hash_fields
from pibroch.data.parquet import ParquetSource
from pibroch.data.schema import Schema
from pibroch.data.sources import Place
from pibroch.data.streams import rows
from pibroch.data.streams.base import Range, Records
from pibroch.data.streams.decode import Decoder
from pibroch.data.streams.rows import RowsFile
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import DataError

SCHEMA = """
label = "y"
weight = "w"
group = "g"
time = "at"
[dense.count]
[dense.price]
transform = "identity"
[categorical.raw]
encoding = "raw"
[categorical.hashed]
encoding = "hash"
num_buckets = 50
[categorical.number]
encoding = "integer"
num_buckets = 9
[categorical.word]
encoding = "vocabulary"
[categorical.old]
encoding = "vocabulary"
[categorical.hour]
column = "at"
binning = "hour"
[categorical.year]
column = "number"
encoding = "hash"
num_buckets = 7
characters = [0, 1]
[categorical.tags]
encoding = "raw"
multi_hot = true
[categorical.huge]
encoding = "raw"
"""
INTEGERS = """
label = "y"
weight = "w"
group = "g"
time = "at"
[dense.count]
[categorical.raw]
encoding = "raw"
[categorical.hashed]
encoding = "hash"
num_buckets = 50
[categorical.number]
encoding = "integer"
num_buckets = 9
[categorical.hour]
column = "at"
binning = "hour"
"""
EDGES = [0, -1, 9, 10, 10**15, 10**17 + 1, 10**18 - 1, 10**18, -(10**18) - 9, 2**63 - 1, -(2**63)]


def table(count=400, seed=0):
    """Rows with what is missing, odd or bad here and there."""
    draw = np.random.default_rng(seed)

    def some(values, every):
        return [None if draw.random() < 1 / every else value for value in values]

    longs = np.where(
        draw.random(count) < 0.3, draw.choice(EDGES, count), draw.integers(99, size=count)
    )
    prices = np.where(
        draw.random(count) < 0.02, np.inf, draw.random(count) * 10.0 ** draw.integers(-9, 9, count)
    )
    words = draw.choice(["a", 'b"c', "d,e", "", "f\n", "é"], count)
    moment = datetime.datetime(2026, 1, 1)
    return pl.DataFrame(
        {
            "y": pl.Series(some((draw.random(count) * 2.05).astype(int), 50), dtype=pl.UInt8),
            "w": pl.Series(draw.integers(-1, 60, count), dtype=pl.Int16),
            "g": pl.Series(longs, dtype=pl.Int64),
            "at": some(
                [moment + datetime.timedelta(hours=i, microseconds=i) for i in range(count)], 60
            ),
            "count": pl.Series(some(longs.tolist(), 9), dtype=pl.Int64),
            "price": prices,
            "raw": pl.Series(some(longs.tolist(), 9), dtype=pl.Int64),
            "hashed": pl.Series(draw.integers(2**32, size=count), dtype=pl.UInt32),
            "number": pl.Series(some(draw.integers(-2, 12, count).tolist(), 9), dtype=pl.Int8),
            "word": some(words.tolist(), 9),
            "old": pl.Series(draw.integers(6, size=count), dtype=pl.Int32),
            "tags": [[int(each) for each in draw.integers(99, size=i % 3)] for i in range(count)],
            "huge": pl.Series(
                draw.integers(2**63, size=count).astype(np.uint64) * 2, dtype=pl.UInt64
            ),
        }
    )


def codes_of(texts):
    fields = "".join(texts).encode()
    ends = np.cumsum([len(text.encode()) for text in texts])
    starts = ends - [len(text.encode()) for text in texts]
    return hash_fields(np.frombuffer(fields, np.uint8), starts, ends)


@pytest.fixture(params=[SCHEMA, INTEGERS], ids=["mixed", "integers alone"])
def schema(request):
    return Schema.from_toml(request.param)


@pytest.fixture
def decoder(schema):
    words = {"word": codes_of(["a", 'b"c', "é"]), "old": codes_of(["4", "1", "0"])}
    words = {name: codes for name, codes in words.items() if name in schema.keys}
    return Decoder(schema, Vocabularies(schema, "", words).encoders())


def as_text(path, schema):
    """The file as one range, all columns of which became text."""
    source = ParquetSource(path, schema)
    text = b"".join(piece.text for piece in source.pieces(Place(), 1 << 20))
    count = pl.read_parquet(path).height
    range = Range("0", "t.parquet", 0, count, 0, count, zlib.crc32(text))
    return Records(range, text, source.columns, source.layout)


def same(one, other):
    for name in ("labels", "dense", "ids", "raw_ids", "sample_weights", "groups", "event_times"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
    assert one.bags.keys() == other.bags.keys()
    for name, arrays in one.bags.items():
        for a, b in zip(arrays, other.bags[name], strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name


def read(path, schema, decoder, most):
    """The file in ranges of at most so many rows."""
    file = RowsFile(path, "t.parquet", "0", schema)
    parts = []
    while (records := file.next(most)) is not None:
        parts.append((records.range, decoder.decode(records)))
    return parts


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_rows_by_column_are_those_of_their_text(tmp_path, schema, decoder, most, monkeypatch):
    monkeypatch.setattr(rows, "_ROWS", 64)
    path = tmp_path / "t.parquet"
    table().write_parquet(path, row_group_size=50)
    expected = decoder.decode(as_text(path, schema))
    assert 30 < len(expected.bad) < 200
    parts = read(path, schema, decoder, most)
    same(decoder.joined([part.rows for _, part in parts]), expected.rows)
    assert [bad for _, part in parts for bad in part.bad] == list(expected.bad)


@pytest.mark.parametrize("at_once", [23, 1000])
def test_what_follows_a_range_that_is_read_again(tmp_path, schema, decoder, monkeypatch, at_once):
    path = tmp_path / "t.parquet"
    table().write_parquet(path, row_group_size=50)
    wanted = read(path, schema, decoder, 100)
    monkeypatch.setattr(rows, "_ROWS", at_once)
    file = RowsFile(path, "t.parquet", "0", schema)
    same(decoder.decode(file.again(wanted[1][0])).rows, wanted[1][1].rows)
    parts = []
    while (records := file.next(30)) is not None:
        parts.append(decoder.decode(records))
    same(
        decoder.joined([part.rows for part in parts]),
        decoder.joined([part.rows for _, part in wanted[2:]]),
    )
    assert [bad for part in parts for bad in part.bad] == [
        bad for _, part in wanted[2:] for bad in part.bad
    ]


def test_a_range_is_the_same_however_a_file_is_cut(tmp_path, schema, decoder, monkeypatch):
    path = tmp_path / "t.parquet"
    table().write_parquet(path, row_group_size=50)
    wanted = read(path, schema, decoder, 37)
    monkeypatch.setattr(rows, "_ROWS", 23)
    file = RowsFile(path, "t.parquet", "0", schema)
    for range, part in (*wanted[::-1], *wanted):
        same(decoder.decode(file.again(range)).rows, part.rows)
    changed = table().with_columns(
        raw=pl.col("raw") + (pl.int_range(pl.len()) == 40).cast(pl.Int64)
    )
    changed.write_parquet(path)
    file = RowsFile(path, "t.parquet", "0", schema)
    file.again(wanted[0][0])
    with pytest.raises(DataError, match="whose records are others now"):
        file.again(wanted[1][0])


@pytest.mark.parametrize("columns", [["y", "raw"], ["y", "word"]])
def test_integers_alone_and_one_text_that_is_missing(tmp_path, columns):
    encoding = 'encoding = "raw"'
    schema = Schema.from_toml(f'label = "y"\n[categorical.{columns[1]}]\n{encoding}\n')
    decoder = Decoder(schema, Vocabularies(schema, "", {}).encoders())
    path = tmp_path / "t.parquet"
    table().select(columns).write_parquet(path)
    expected = decoder.decode(as_text(path, schema))
    parts = read(path, schema, decoder, 100)
    joined = decoder.joined([part.rows for _, part in parts])
    assert joined.labels.tobytes() == expected.rows.labels.tobytes()
    assert joined.raw_ids.tobytes() == expected.rows.raw_ids.tobytes()
    assert [bad for _, part in parts for bad in part.bad] == list(expected.bad)


def test_a_file_without_a_column_is_an_error_that_names_both(tmp_path, schema, decoder):
    path = tmp_path / "t.parquet"
    table().drop("raw").write_parquet(path)
    with pytest.raises(DataError, match=r"(?s)t\.parquet.*raw"):
        read(path, schema, decoder, 100)
