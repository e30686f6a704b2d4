"""Quotes that are not closed.

Records that they swallow are found, newlines in values are not taken for them.
"""

import gzip
import random

import numpy as np
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.parse import PieceParser
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError

SCHEMA = Schema.from_toml('label = "y"\n[dense.n]\n[categorical.c]\n[categorical.d]\n')
COLUMNS = ("y", "n", "c", "d")


def parse(*lines: str):
    return PieceParser(SCHEMA, COLUMNS).parse("\n".join(lines).encode(), first_line=2)


def prepared(path, tmp_path, **options):
    options.setdefault("piece_bytes", 4096)
    source = TextSource(path, ",", True)
    return prepare([source], SCHEMA, tmp_path / "out", PrepareOptions(**options))


@pytest.mark.parametrize(
    ("lines", "num_bad", "reason"),
    [
        (['1,2,"u1,x', "0,3,u2,y", "1,4,u3,z"], 3, "and is never closed"),
        (
            ['1,2,u1,"x', "0,3,u2,y", "1,4,u3,z", '0,5,u4,"w"'],
            4,
            "and text follows where it is closed",
        ),
        (['1,2,"u1,x', "0,3,u2,y", '1,4,5",z'], 3, "and 3 of them are records by themselves"),
        (['1,2,"u1,x', '1,4,5",z'], 2, "and 2 of them are records by themselves"),
        (['1,2,u1,"x', "0,3,u2,y", '1,4,u3,12"'], 3, "and 3 of them are records by themselves"),
        (['1,2,"u,1","x', "0,3,u2,y", '1,4,u3,12"'], 2, "and 2 of them are records by themselves"),
        (['1,2,"u1,x', "0,3,u2,y", '1,4,5"'], 2, "records by themselves"),
        (['"1,2,u1,x', "0,3,u2,y", '1",4,u3,z'], 1, "records by themselves"),
    ],
)
def test_records_inside_a_quote_are_counted_and_the_line_is_named(lines, num_bad, reason):
    good = "1,2,u,x"
    end = [] if "never" in reason else [good]
    piece = parse(good, *lines, *end)
    assert len(piece.labels) == 1 + len(end)
    assert piece.num_bad == num_bad
    assert [record.line for record in piece.bad] == [3]
    assert (
        reason in piece.bad[0].reason and f"{len(lines)} lines stand in it" in piece.bad[0].reason
    )


@pytest.mark.parametrize(
    "record",
    [
        '1,2,"a text\nof, two lines",x',
        '1,2,"1,2\n\n3,4,5\n",x',
        '1,2,"a\nb\nc" ,"d\r\ne"',
        '1,2,"say ""0,1\n1,b,3"" twice",x',
        '"1","2","7,8,u,x\n9,8,u,x",x',
        '1,2,"""\n""","\n"',
    ],
)
def test_newlines_in_values_are_values(record):
    piece = parse("1,2,u,x", record, "0,3,v,y")
    assert piece.labels.tolist() == [1, 1, 0] and piece.num_bad == 0


@pytest.mark.parametrize("resynchronised", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_twenty_thousand_records_is_refused(tmp_path, resynchronised, packed):
    lines = [f"{i % 2},{i}.5,u{i % 7},v{i % 5}" for i in range(20_000)]
    lines[8] = '0,8.5,u1,"v3'
    if resynchronised:
        lines[9_000] += '"'
    data = "\n".join([",".join(COLUMNS), *lines]).encode()
    path = tmp_path / "clicks.csv"
    path.write_bytes(gzip.compress(data) if packed else data)
    num_inside = 9000 - 8 + 1 if resynchronised else 20_000 - 8
    with pytest.raises(
        DataError,
        match=rf"got {num_inside} malformed of .*clicks.csv line 10: a quote opens in this record",
    ):
        prepared(path, tmp_path, piece_bytes=1 << 20)
    with pytest.raises(DataError, match=r"begins in line 10 of .*clicks.csv"):
        prepared(path, tmp_path)
    report = prepared(path, tmp_path, piece_bytes=1 << 20, max_bad_fraction=1)
    assert sum(report.samples.values()) == 20_000 - num_inside
    assert report.num_bad == num_inside


def test_texts_of_several_lines_cost_no_record(tmp_path):
    generator = random.Random(3)
    texts = [
        "\n".join(generator.choices(["some, text", "1,000", "0", "", 'a ""quote""', "x,y,z"], k=4))
        for _ in range(3000)
    ]
    lines = [f'{i % 2},{i},"{text}",v{i % 5}' for i, text in enumerate(texts)]
    (tmp_path / "clicks.csv").write_text("\n".join([",".join(COLUMNS), *lines]))
    prepared(tmp_path / "clicks.csv", tmp_path, split=SplitRule.parse("none"))
    split = EncodedDataset.open(tmp_path / "out").split("train")
    np.testing.assert_allclose(split.dense[:, 0], np.log1p(np.arange(3000)), rtol=1e-6)
