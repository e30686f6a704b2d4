"""Tomorrow's data, encoded with what was known when the model was trained."""

import csv
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import pibroch as pb
from pibroch.cli.data import _text_source
from pibroch.config.data import DataConfig
from pibroch.data import EncodedDataset
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import CheckpointError, DataError
from pibroch.score.checkpoint import evaluate_checkpoint, open_for
from pibroch.score.split import score_split
from pibroch.serve.export import export_checkpoint
from pibroch.serve.vocabularies import find_vocabularies
from pibroch.train.data_source import open_dataset
from raw_clicks import COLUMNS, raw_rows, write_csv
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
    """Scores of rows by a program of its own.

    Dictionaries counted from the raw training rows, ids looked up in Python.
    """
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
    data = tmp_path / "day"
    out = tmp_path / "scores.csv"
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
    actual = [find_vocabularies(source) for source in sources.values()]
    expected = Vocabularies.of_dataset(EncodedDataset.open(clicks.data))
    for each in actual:
        assert each.schema == expected.schema and each.fingerprint == expected.fingerprint
        assert {name: codes.tolist() for name, codes in each.codes.items()} == {
            name: codes.tolist() for name, codes in expected.codes.items()
        }


def test_what_cannot_be(clicks, sources, tomorrow, tmp_path):
    _, path = tomorrow
    (tmp_path / "empty").mkdir()
    arguments = ["data", "prepare", "csv", path, "--out", tmp_path / "out"]
    for more, message in (
        (["--vocabularies", clicks.data, "--min-count", 1], "leave these options out"),
        (["--vocabularies", tmp_path / "empty"], "a run directory"),
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


def test_data_without_labels_are_scored_and_no_more(clicks, tomorrow, tmp_path):
    """Text with or without the label's column, with or without a header, and Parquet.

    The scores of the labelled data.
    """
    rows, path = tomorrow
    names = [name for name in COLUMNS if name != "clicked"]
    lines = [",".join(row[name] for name in names) for row in rows]
    bare = tmp_path / "bare.csv"
    headless = tmp_path / "headless.csv"
    bare.write_text("\n".join([",".join(names), *lines]) + "\n", encoding="utf-8")
    headless.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pl.read_csv(bare, infer_schema=False).write_parquet(tmp_path / "bare.parquet")
    data = tmp_path / "day"
    ran = run_command(
        "data", "prepare", "csv", bare, "--vocabularies", clicks.run, "--unlabelled", "--out", data
    )
    assert ran.returncode == 0, ran.stderr
    dataset = EncodedDataset.open(data)
    labelled = tmp_path / "labelled"
    existing = find_vocabularies(clicks.run)
    options = PrepareOptions(SplitRule.parse("test"), vocabularies=existing, has_labels=False)
    prepare(
        [TextSource(path, ",", True)], existing.schema, labelled, replace(options, has_labels=True)
    )
    expected = EncodedDataset.open(labelled).split("test")
    assert not dataset.has_labels and EncodedDataset.open(labelled).has_labels
    sources = {
        "labels are not read": TextSource(path, ",", True),
        "headless": _text_source(
            headless, existing.schema.model_copy(update={"columns": COLUMNS}), False
        ),
        "parquet": ParquetSource(tmp_path / "bare.parquet", existing.schema, has_labels=False),
    }
    actual = [dataset.split("test")]
    for name, source in sources.items():
        prepare([source], existing.schema, tmp_path / name, options)
        actual.append(EncodedDataset.open(tmp_path / name).split("test"))
    for split in actual:
        assert np.array_equal(split.ids, expected.ids) and np.array_equal(
            split.dense, expected.dense
        )
        assert not split.labels.any()
    predictor, checkpoint = open_for(clicks.run, dataset)
    for each, out in ((dataset, "scores.csv"), (EncodedDataset.open(labelled), "labelled.csv")):
        score_split(predictor, checkpoint, each, "test", tmp_path / out)
    frame = pl.read_csv(tmp_path / "scores.csv")
    assert frame["label"].null_count() == 400
    assert frame["score"].equals(pl.read_csv(tmp_path / "labelled.csv")["score"])
    with pytest.raises(
        DataError, match="no labels; need labels, to compare with; do: use pibroch predict"
    ):
        evaluate_checkpoint(clicks.run, dataset, "test")
    with pytest.raises(DataError, match="no labels; need labels, to train"):
        open_dataset(DataConfig(dir=str(data)))


def test_what_lacks_labels_by_mistake_is_refused(clicks, tmp_path):
    bare = tmp_path / "bare.csv"
    bare.write_text("price,age,user,city,slot,tags\n1,2,a,b,1,\n", encoding="utf-8")
    existing = find_vocabularies(clicks.data)
    source = TextSource(bare, ",", True)
    rule = SplitRule.parse("test")
    with pytest.raises(DataError, match=r"need a column `clicked`; do: .*--unlabelled"):
        prepare(
            [source], existing.schema, tmp_path / "a", PrepareOptions(rule, vocabularies=existing)
        )
    with pytest.raises(DataError, match="do: pass --vocabularies FROM"):
        prepare([source], existing.schema, tmp_path / "a", PrepareOptions(has_labels=False))
