import logging

import numpy as np
import pytest

from pibroch.data import health
from pibroch.data.dataset import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource

NUM_RECORDS = 1000


def prepared(tmp_path, feature, value=lambda i: i % 10, label=lambda i: int(i % 4 == 0)):
    """Prepare a column of which the schema says ``feature``; the report and the dataset."""
    lines = ["y,c", *(f"{label(i)},{value(i)}" for i in range(NUM_RECORDS))]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    schema = Schema.from_toml(f'label = "y"\n[categorical.c]\n{feature}\n')
    out = tmp_path / "out"
    report = prepare(
        [TextSource(tmp_path / "clicks.csv", ",", True)], schema, out, PrepareOptions()
    )
    return report, EncodedDataset.open(out)


INTEGER = 'encoding = "integer"\nnum_buckets = 10'


def test_shares_and_click_rates(tmp_path):
    report, dataset = prepared(tmp_path, INTEGER, lambda i: ["", -5, 3, 4][i % 4])
    assert report.samples == {"train": 700, "validation": 150, "test": 150}
    assert health.shares(dataset)["c"] == health.Shares(700, 0.25, 0.25)
    rates = health.click_rates(dataset)["y"]
    expected = [
        np.mean([i % 4 == 0 for i in split])
        for split in (range(700), range(700, 850), range(850, 1000))
    ]
    assert list(rates.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("feature", "value", "warning"),
    [
        (
            INTEGER,
            lambda i: -1 - i,
            "`c`: 100.0% of its training ids are no whole numbers from 0 to 9",
        ),
        (INTEGER, lambda i: 10**12 + i, "`c`: 100.0% of its training ids are no whole numbers"),
        (INTEGER, lambda i: 77 if i % 50 == 0 else 1, "`c`: 2.0% of its training ids are no whole"),
        (
            "min_count = 2",
            lambda i: f"u{i}",
            "`c`: 100.0% of its training ids are unknown, seen fewer than 2 times",
        ),
        ("max_rows = 4", lambda i: i % 10, "`c`: 80.0% of its training ids are unknown"),
        (
            "min_count = 1",
            lambda i: "",
            "`c`: 100.0% of its training ids are missing: check the column `c`",
        ),
        ("multi_hot = true", lambda i: "", "`c`: no training sample has an id"),
        ('binning = "log"', lambda i: "", "ids are missing"),
    ],
)
def test_ids_that_say_nothing_are_warned_of(tmp_path, caplog, feature, value, warning):
    with caplog.at_level(logging.WARNING, "pibroch"):
        report, dataset = prepared(tmp_path, feature, value)
    assert len(report.warnings) == 1 and warning in report.warnings[0]
    assert caplog.messages == list(report.warnings) == health.warnings(dataset)


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (INTEGER, lambda i: i % 10),
        (INTEGER, lambda i: "" if i % 2 else 3),
        ("min_count = 2", lambda i: i % 400 if i % 2 else 1),
        ('encoding = "hash"\nnum_buckets = 5', lambda i: i),
    ],
)
def test_ordinary_columns_are_not(tmp_path, feature, value):
    assert prepared(tmp_path, feature, value)[0].warnings == ()


def test_labels_that_are_all_alike(tmp_path):
    report, dataset = prepared(tmp_path, INTEGER, label=lambda i: int(i < 700))
    assert report.warnings == tuple(
        f"all labels of the {split} split are {rate}: check the column `y`"
        for split, rate in (("train", 1), ("validation", 0), ("test", 0))
    )
    assert health.click_rates(dataset)["y"] == {"train": 1.0, "validation": 0.0, "test": 0.0}
