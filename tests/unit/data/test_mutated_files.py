"""Files with a wound: an error that names the place, or every row that the wound left alone."""

import csv
import gzip
import io
import os
import random
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError

NUM_RECORDS = 60
NUM_WOUNDS = 17  # of each of the eight kinds of text
NUM_TABLE_WOUNDS = 16  # of each of the four kinds of table: 200 wounds in all
COLUMNS = ("y", "n", "c", "tags", "other")
HASHED = 'encoding = "hash"\nnum_buckets = 10000\n'
SCHEMA = (
    'label = "y"\n[dense.n]\ntransform = "identity"\n'
    f"[categorical.c]\n{HASHED}[categorical.tags]\nmulti_hot = true\n{HASHED}"
)
INSERTED = [
    b'"',
    b'"',
    b",",
    b"\t",
    b"\n",
    b"\r",
    b"\0",
    b"a",
    b"1",
    b"\xff",
    b'","',
    b'"\n',
    b"\n\n",
    b"1,2,3\n",
]
Row = tuple[float, ...]


@dataclass(frozen=True)
class Wounded:
    """A file of text, which records the wound has touched, and on which lines these are."""

    data: bytes
    touched: Collection[int]
    lines: Collection[int]


def records(generator: random.Random, plain: bool = False) -> list[list[str]]:
    """Records with a number of their own, so that each can be found again.

    In plain ones nothing has to be quoted.
    """
    texts = [
        "red",
        "",
        "a b",
        "blue,green",
        'say "hi"',
        'say "a,b"',
        "two\nlines",
        "1,5\nx,y",
        'a "q"\n"b",c\n,',
        "12",
    ]
    texts = ["red", "", "a b", "12"] if plain else texts
    tags = ["a|b", "", "c", "a||b", *([] if plain else ["x,y|z"])]
    return [
        [
            str(generator.randint(0, 1)),
            str(i),
            *(generator.choice(texts) for _ in "c"),
            generator.choice(tags),
            "end",
        ]
        for i in range(NUM_RECORDS)
    ]


def as_text(rows: list[list[str]], separator: str, quoting: Any, newline: str) -> list[bytes]:
    """The header and the records, each with its newline."""
    written = []
    for row in [list(COLUMNS), *rows]:
        text = io.StringIO()
        if separator == "\t":
            row = [re.sub(r"[\t\n]", " ", field) for field in row]
            text.write("\t".join(row) + newline)
        else:
            csv.writer(text, delimiter=separator, quoting=quoting, lineterminator=newline).writerow(
                row
            )
        written.append(text.getvalue().encode())
    return written


def place_of_column(part: bytes, column: str, separator: bytes) -> tuple[int, int]:
    """Where a field begins and ends in the text of its record."""
    label, number, _ = part.split(separator, 2)
    begin = {"y": 0, "n": len(label) + 1, "other": part.rindex(b"end")}[column]
    return begin, begin + {"y": len(label), "n": len(number), "other": len(b"end")}[column]


def open_quote(generator: random.Random, parts: list[bytes], separator: bytes) -> Wounded:
    """A quote before a field, and perhaps one behind the same field of a later record.

    Between them all is text.
    """
    column = generator.choice(["y", "n", "other", "other"])
    first, last = sorted(generator.sample(range(1, len(parts)), 2))
    begin, _ = place_of_column(parts[first], column, separator)
    _, end = place_of_column(parts[last], column, separator)
    changed = list(parts)
    touched = {first}
    changed[first] = parts[first][:begin] + b'"' + parts[first][begin:]
    if generator.random() < 0.5:
        changed[last] = parts[last][:end] + b'"' + parts[last][end:]
        touched.add(last)
    lines: set[int] = set()
    for record in touched:
        line = b"".join(changed[:record]).count(b"\n") + 1
        lines |= set(range(line, line + parts[record].count(b"\n") + 1))
    return Wounded(b"".join(changed), touched, lines)


def wound(generator: random.Random, parts: list[bytes], separator: bytes) -> Wounded:
    """Change, insert or remove some bytes."""
    if generator.random() < 0.25:
        return open_quote(generator, parts, separator)
    data = b"".join(parts)
    start = generator.randrange(len(data))
    quotes = [place for place, byte in enumerate(data) if byte == ord('"')]
    how = generator.choice(
        ["flip", "insert", "insert", "remove", "remove", "quote", "quote", "chunk", "cut", "repeat"]
    )
    if how == "quote" and quotes:
        start = generator.choice(quotes)
    end = {"flip": start + 1, "remove": start + 1, "quote": start + 1, "cut": len(data)}.get(
        how, start
    )
    if how == "chunk":
        end = min(len(data), start + generator.randint(1, 80))
    new = generator.choice(INSERTED) if how == "insert" else b""
    new = bytes([data[start] ^ (1 << generator.randrange(8))]) if how == "flip" else new
    new = data[start : start + generator.randint(1, 60)] if how == "repeat" else new
    changed = data[:start] + new + data[end:]
    ends = np.cumsum([len(part) for part in parts])
    first = int(np.searchsorted(ends, max(start - 1, 0), side="right"))
    last = min(int(np.searchsorted(ends, end, side="right")), len(parts) - 1)
    before = int(ends[first]) - len(parts[first])
    after = int(ends[last]) + len(changed) - len(data)
    lines = range(changed[:before].count(b"\n") + 1, changed[:after].count(b"\n") + 2)
    return Wounded(changed, range(first, last + 1), lines)


def rows_of(
    source: TextSource | ParquetSource, out: Path, schema: Schema
) -> list[tuple[float, Row]]:
    """The number of each prepared sample, and its label, category and tags."""
    options = PrepareOptions(split=SplitRule.parse("none"), overwrite=True, piece_bytes=1 << 16)
    prepare([source], schema, out, options)
    split = EncodedDataset.open(out).split("train")
    bags = split.bags["tags"]
    return [
        (number, (label, category, *bags.values[bags.offsets[i] : bags.offsets[i + 1]].tolist()))
        for i, (number, label, category) in enumerate(
            zip(
                split.dense[:, 0].tolist(),
                split.labels.tolist(),
                split.ids[:, 0].tolist(),
                strict=True,
            )
        )
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Prepares a file without waiting for the disk, and gives its rows."""
    fsync = os.fsync
    os.fsync = lambda descriptor: None
    folder = tmp_path_factory.mktemp("prepared")

    def find(path, kind):
        schema = Schema.from_toml(
            ('separator = "\\t"\nquotes = false\n' if kind == "tsv" else "") + SCHEMA
        )
        source = (
            ParquetSource(path, schema)
            if kind == "parquet"
            else TextSource(path, schema.separator, schema.quotes)
        )
        try:
            return rows_of(source, folder / "out", schema)
        finally:
            shutil.rmtree(folder / "out.partial", ignore_errors=True)

    yield find
    os.fsync = fsync


TEXT_KINDS = [
    (kind, quoting, newline)
    for kind, quoting in [
        ("csv", csv.QUOTE_MINIMAL),
        ("csv", csv.QUOTE_ALL),
        ("plain", csv.QUOTE_MINIMAL),
        ("tsv", 0),
    ]
    for newline in ("\n", "\r\n")
]


@pytest.mark.parametrize(("kind", "quoting", "newline"), TEXT_KINDS)
def test_text_with_a_wound(tmp_path, rows, kind, quoting, newline):
    generator = random.Random(f"{kind}{quoting}{newline}")
    parts = as_text(
        records(generator, kind == "plain"), "\t" if kind == "tsv" else ",", quoting, newline
    )
    path = tmp_path / f"clicks.{kind}"
    path.write_bytes(b"".join(parts))
    whole = rows(path, kind)
    assert [number for number, _ in whole] == list(range(NUM_RECORDS))
    num_errors = 0
    for number in range(NUM_WOUNDS):
        wounded = wound(generator, parts, b"\t" if kind == "tsv" else b",")
        path.write_bytes(gzip.compress(wounded.data) if number % 3 == 0 else wounded.data)
        try:
            left = rows(path, kind)
        except DataError as error:
            check_place(str(error), wounded, path)
            num_errors += 1
            continue
        lost = [
            row for i, row in enumerate(whole) if i + 1 not in wounded.touched and row not in left
        ]
        assert not lost, (wounded, lost)
    assert 0 < num_errors < NUM_WOUNDS


def check_place(message: str, wounded: Wounded, path: Path) -> None:
    """The error names the file with the line, or the header with what is wrong with it."""
    if 0 in wounded.touched and "got the columns" in message:
        return
    assert str(path) in message, message
    if not any(
        why in message
        for why in ("which is empty", "no records in", "zero bytes in its first line")
    ):
        lines = [int(number) for number in re.findall(r" line (\d+)", message)]
        assert lines and lines[0] in wounded.lines, (message, wounded.lines)


def write_table(
    path: Path, rows: list[list[str]], generator: random.Random, compression: Any
) -> bytes:
    """The records as a Parquet file, tags as lists or as text; returns its bytes."""
    tags = [row[3].split("|") if compression != "zstd" else row[3] for row in rows]
    table = {
        "y": [int(row[0]) for row in rows],
        "n": [float(row[1]) for row in rows],
        "c": [row[2] or None for row in rows],
    }
    frame = pl.DataFrame({**table, "tags": tags, "other": "end"})
    frame.write_parquet(path, compression=compression, row_group_size=generator.choice([7, 100]))
    return path.read_bytes()


def wounded_table(generator: random.Random, data: bytes) -> bytes:
    """A table with a bit flipped, or with bytes removed, inserted, zeroed or cut off."""
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    how = generator.choice(["flip", "flip", "footer", "footer", "remove", "insert", "cut", "zero"])
    start = generator.randrange(footer if how == "footer" else 0, len(data))
    if how in ("flip", "footer"):
        return (
            data[:start] + bytes([data[start] ^ (1 << generator.randrange(8))]) + data[start + 1 :]
        )
    if how == "insert":
        return data[:start] + bytes([generator.randrange(256)]) + data[start:]
    end = {"remove": start + 1, "cut": len(data), "zero": min(len(data), start + 50)}[how]
    return data[:start] + bytes(end - start if how == "zero" else 0) + data[end:]


@pytest.mark.parametrize("compression", ["uncompressed", "snappy", "zstd", "lz4"])
def test_tables_with_a_wound(tmp_path, rows, compression):
    """Without checksums of its pages a table cannot tell another value.

    But no row may be lost, and nothing may crash.
    """
    generator = random.Random(compression)
    path = tmp_path / "clicks.parquet"
    num_errors = 0
    whole = write_table(path, records(generator), generator, compression)
    assert [number for number, _ in rows(path, "parquet")] == list(range(NUM_RECORDS))
    for _ in range(NUM_TABLE_WOUNDS):
        path.write_bytes(wounded_table(generator, whole))
        try:
            assert len(rows(path, "parquet")) == NUM_RECORDS
        except DataError as error:
            assert str(path) in str(error) or "got the columns" in str(error)
            num_errors += 1
    assert 2 < num_errors < NUM_TABLE_WOUNDS - 2
