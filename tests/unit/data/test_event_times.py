"""When events were: from a column of any unit to milliseconds in batches."""

from datetime import UTC, datetime

import polars as pl
import pytest
import torch

from pibroch.data import EncodedDataset, Loader
from pibroch.data.parquet import ParquetSource
from pibroch.data.parse import PieceParser
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError

SCHEMA = """
label = "click"
time = "at"
time_unit = "{unit}"
[categorical.item]
encoding = "{encoding}"
"""
START_MS = 1_700_000_000_123


def schema(unit="ms", encoding="raw"):
    return Schema.from_toml(SCHEMA.format(unit=unit, encoding=encoding))


def source(path, kind, unit):
    times = [START_MS + 1000 * place for place in range(90)]
    if kind == "parquet":
        moments = [datetime.fromtimestamp(time / 1000, UTC) for time in times]
        frame = pl.DataFrame({"click": [0, 1] * 45, "at": moments, "item": list(range(90))})
        frame.write_parquet(path)
        return ParquetSource(path, schema(unit))
    scale = {"s": 1e-3, "ms": 1, "us": 1000}[unit]
    rows = [f"{place % 2},{time * scale!r},{place}\n" for place, time in enumerate(times)]
    path.write_text("click,at,item\n" + "".join(rows))
    return TextSource(path, ",", True)


@pytest.mark.parametrize("encoding", ["raw", "vocabulary"])
@pytest.mark.parametrize(("kind", "unit"), [("csv", "s"), ("csv", "us"), ("parquet", "ms")])
def test_times_reach_batches(tmp_path, encoding, kind, unit):
    options = PrepareOptions(SplitRule.parse("time:0.8/0.1/0.1", 0))
    prepare(
        [source(tmp_path / "log", kind, unit)], schema(unit, encoding), tmp_path / "out", options
    )
    dataset = EncodedDataset.open(tmp_path / "out")
    dataset.verify()
    batch = next(iter(Loader(dataset.split("validation"), 4, part=(1, 2))))
    expected = [START_MS + 1000 * place for place in (74, 75)]
    # the nearest float64 of seconds may lie a millisecond below
    assert len(batch.event_times) == 2
    assert abs(batch.event_times - torch.tensor(expected)).max() <= 1
    assert dataset.schema.used_columns(with_label=False) == ("item",)


def test_a_record_without_a_time_is_bad():
    parser = PieceParser(schema(), ("click", "at", "item"))
    piece = parser.parse(b"1,5,a\n0,,b\n1,soon,c\n0,-7,d\n")
    assert piece.event_times.tolist() == [5, -7]
    assert [bad.line for bad in piece.bad] == [2, 3]
    assert "as at" in piece.bad[0].reason


def test_data_without_a_time_have_none():
    parser = PieceParser(
        Schema.from_toml('label = "click"\n[categorical.item]\n'), ("click", "item")
    )
    assert parser.parse(b"1,a\n").event_times is None


def test_a_label_is_no_time():
    with pytest.raises(ConfigError, match="no label"):
        Schema.from_toml('label = "click"\ntime = "click"\n[categorical.item]\n')
