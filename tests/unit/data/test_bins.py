"""Numbers by bounds and parts of times, and dense ones by a mean and a deviation."""

import datetime

import numpy as np
import polars as pl
import pytest

from pibroch.data import EncodedDataset, Loader
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.transform import bin_rows, num_bin_rows
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import ConfigError

SCHEMA = """label = "y"
[dense.age]
transform = "identity"
mean = 38.5
std = 13.0
[dense.at]
[categorical.decade]
column = "age"
binning = [18, 65.5]
[categorical.hour]
column = "at"
binning = "hour"
[categorical.weekday]
column = "at"
binning = "weekday"
"""


def test_parts_of_times_are_the_calendars():
    moments = np.random.default_rng(1).integers(-(10**9), 2 * 10**9, 500)
    dates = [datetime.datetime.fromtimestamp(moment, datetime.UTC) for moment in moments.tolist()]
    seconds = moments.astype(np.float64)
    assert bin_rows(seconds, "hour").tolist() == [2 + date.hour for date in dates]
    assert bin_rows(seconds, "weekday").tolist() == [2 + date.weekday() for date in dates]
    assert bin_rows(np.array([np.nan]), "hour").tolist() == [1]
    for binning in ("hour", "weekday", (0.0, 1.0)):
        assert bin_rows(seconds, binning).max() == num_bin_rows(binning) - 1


def test_bins_and_deviations_are_read_alike_in_preparation_and_serving(tmp_path):
    schema = Schema.from_toml(SCHEMA)
    assert Schema.from_toml(schema.to_toml()) == schema
    columns: dict[str, list[float | None]] = {"y": [0, 1, 0, 1], "age": [17.0, 18.0, None, 65.5]}
    columns |= {"at": [0, 3600, 86400 * 4, None]}
    pl.DataFrame(columns).write_csv(tmp_path / "log")
    out = tmp_path / "out"
    options = PrepareOptions(split=SplitRule.parse("none", 0))
    prepare([TextSource(tmp_path / "log", ",", True)], schema, out, options)
    dataset = EncodedDataset.open(out)
    assert dataset.num_rows == {"decade": 5, "hour": 26, "weekday": 9}
    (batch,) = Loader(dataset.split("train"), 4)
    want = [[2, 3, 1, 4], [2, 3, 2, 1], [5, 5, 2, 1]]
    assert batch.values.view(3, 4).tolist() == want
    ages = np.array([17, 18, 0, 65.5])
    np.testing.assert_allclose(batch.dense[:, 0], (ages - 38.5) / 13, rtol=1e-6)
    raw = batch_from_raw(schema, Vocabularies.of_dataset(dataset).encoders(), columns)
    assert raw.values.tolist() == batch.values.tolist()
    assert np.array_equal(raw.dense, batch.dense)
    other = Schema.from_toml(SCHEMA.replace("mean = 38.5", "mean = 38.6"))
    prepare([TextSource(tmp_path / "log", ",", True)], other, tmp_path / "other", options)
    assert EncodedDataset.open(tmp_path / "other").fingerprint != dataset.fingerprint


@pytest.mark.parametrize(
    "changed", [("[18, 65.5]", "[18, 18]"), ("[18, 65.5]", "[]"), ("std = 13.0", "std = 0")]
)
def test_bounds_rise_and_deviations_are_above_zero(changed):
    with pytest.raises(ConfigError, match=r"bounds that rise|std"):
        Schema.from_toml(SCHEMA.replace(*changed))
