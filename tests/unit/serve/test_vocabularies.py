"""Tomorrow's data, encoded with what was known when the model was trained."""

import csv

import numpy as np
import polars as pl
import pytest

import pibroch as pb
from pibroch.data import EncodedDataset
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import CheckpointError
from pibroch.serve.export import export_checkpoint
from pibroch.serve.vocabularies import find_vocabularies
from raw_clicks import raw_rows, write_csv
from small_run import run_command


@pytest.fixture(scope="module")
def tomorrow(tmp_path_factory):
    """Rows of which many users were not seen before, and their file."""
    rows = raw_rows(400, seed=5, first_user=6)
    return rows, write_csv(tmp_path_factory.mktemp("tomorrow") / "day.csv", rows)


@pytest.fixture(scope="module")
def sources(clicks, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "ctr"
    export_checkpoint(clicks.run, out)
    return {"dataset": clicks.data, "run": clicks.run, "export": out}


def by_hand(clicks, rows):
    """Scores of rows by a program of its own: dictionaries counted from the raw training rows, ids looked up in Python."""
    counts = {}
    for row in clicks.rows[:2100]:  # the training split
        if row["user"]:
            counts[row["user"]] = counts.get(row["user"], 0) + 1
    kept = {user for user, count in counts.items() if count >= 2}
    unknown = sum(bool(row["user"]) and row["user"] not in kept for row in rows)
    predictor = pb.Predictor.open(clicks.run)
    cleaned = [
        {**row, "user": row["user"] if row["user"] in kept or not row["user"] else "never seen"}
        for row in rows
    ]
    return np.concatenate(
        [predictor.score_raw(cleaned[i : i + 1]).numpy() for i in range(len(rows))]
    ), unknown


@pytest.mark.parametrize("source", ["dataset", "run", "export"])
def test_prepared_with_what_was_known_predicts_as_by_hand(
    clicks, sources, tomorrow, tmp_path, source
):
    rows, path = tomorrow
    data, out = tmp_path / "day", tmp_path / "scores.csv"
    ran = run_command(
        "data", "prepare", "csv", path, "--vocabularies", sources[source], "--out", data
    )
    assert ran.returncode == 0, ran.stderr
    expected, unknown = by_hand(clicks, rows)
    assert unknown > 5 and f"user {unknown} of 400" in ran.stdout
    dataset = EncodedDataset.open(data)
    assert dataset.samples == {"train": 0, "validation": 0, "test": 400}
    assert dataset.fingerprint == EncodedDataset.open(clicks.data).fingerprint
    ran = run_command("predict", "--checkpoint", clicks.run, "--data", data, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert np.abs(pl.read_csv(out)["score"].to_numpy() - expected).max() < 1e-6
    assert [row["label"] for row in csv.DictReader(out.open())] == [
        f"{float(row['clicked'])}" for row in rows
    ]


def test_counts_are_those_of_the_new_training_samples(clicks, tomorrow, tmp_path):
    _, path = tomorrow
    ran = run_command(
        "data",
        "prepare",
        "csv",
        path,
        "--vocabularies",
        clicks.data,
        "--out",
        tmp_path / "day",
        "--split",
        "hash:0.5/0.2/0.3",
    )
    assert ran.returncode == 0, ran.stderr
    dataset = EncodedDataset.open(tmp_path / "day")
    for feature in ("user", "city", "tags"):
        counts = dataset.access_counts(feature)
        samples = dataset.split("train")
        ids = (
            samples.bags[feature].values
            if feature == "tags"
            else samples.ids[:, ["user", "city"].index(feature)]
        )
        assert np.array_equal(counts, np.bincount(ids, minlength=len(counts)))


def test_all_sources_say_the_same(clicks, sources):
    found = [find_vocabularies(source) for source in sources.values()]
    expected = Vocabularies.of_dataset(EncodedDataset.open(clicks.data))
    for each in found:
        assert each.schema == expected.schema and each.fingerprint == expected.fingerprint
        assert {name: codes.tolist() for name, codes in each.codes.items()} == {
            name: codes.tolist() for name, codes in expected.codes.items()
        }


def test_what_cannot_be(clicks, sources, tomorrow, tmp_path):
    _, path = tomorrow
    arguments = ["data", "prepare", "csv", path, "--out", tmp_path / "out"]
    for more, message in (
        (["--vocabularies", clicks.data, "--min-count", 1], "leave these options out"),
        (["--vocabularies", tmp_path], "a run directory"),
        (["--schema", tmp_path / "none.toml", "--split", "test"], "none.toml"),
    ):
        ran = run_command(*arguments, *more)
        assert ran.returncode == 2 and message in ran.stderr, ran.stderr
    criteo = ["data", "prepare", "criteo", path, "--out", tmp_path / "out", "--split", "validation"]
    ran = run_command(*criteo)
    assert ran.returncode == 2 and "--vocabularies" in ran.stderr
    moved = clicks.data.rename(tmp_path / "moved")
    try:
        with pytest.raises(CheckpointError, match="a dataset or an export"):
            find_vocabularies(clicks.run)
    finally:
        moved.rename(clicks.data)
