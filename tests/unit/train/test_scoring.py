"""Scores in a file: those of evaluation, in the split's order.

A run that was cut off goes on, and nothing is overwritten.
"""

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from pibroch.cli.main import app
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import ConfigError
from pibroch.score.checkpoint import evaluate_checkpoint, open_for
from pibroch.score.split import score_split
from small_run import make_config, train_here


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    config = make_config(
        data, "train.steps=12", "train.average=0.9", "train.evaluate_batch_size=100"
    )
    return train_here(config, tmp_path_factory.mktemp("runs") / "run")[0].path


def read(path):
    return pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)


@pytest.mark.parametrize("name", ["scores.parquet", "scores.csv"])
def test_the_scores_of_evaluation_in_order(run, data, tmp_path, name):
    dataset = EncodedDataset.open(data)
    predictor, folder = open_for(run, dataset)
    steps = []
    done = score_split(predictor, folder, dataset, "test", tmp_path / name, steps.append)
    assert (done.num_samples, done.num_kept, sum(steps)) == (
        dataset.samples["test"],
        0,
        dataset.samples["test"],
    )
    assert done.num_samples > 2 * 100
    actual = read(tmp_path / name)
    assert actual["sample"].to_list() == list(range(done.num_samples))
    batches = list(Loader(dataset.split("test"), 100))
    expected = np.concatenate([predictor.scores(batch).numpy() for batch in batches])
    np.testing.assert_allclose(actual["score"].to_numpy(), expected, rtol=1e-6)
    assert actual["label"].to_list() == [
        label for batch in batches for label in batch.labels.tolist()
    ]
    evaluation = evaluate_checkpoint(run, dataset, "test", tmp_path / f"again-{name}")
    assert read(tmp_path / f"again-{name}").equals(actual)
    order = actual["score"].to_numpy()
    positive = order[actual["label"].to_numpy() == 1]
    negative = order[actual["label"].to_numpy() == 0]
    above = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    assert evaluation.metrics.auc == pytest.approx(
        above, abs=1e-4
    )  # float32 probabilities tie where logits do not
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"again-{name}", name]


def test_a_run_that_was_cut_off_goes_on(run, data, tmp_path):
    dataset = EncodedDataset.open(data)
    out = tmp_path / "scores.parquet"
    predictor, folder = open_for(run, dataset)
    done = []

    def stop_later(count):
        done.append(count)
        if sum(done) > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_split(predictor, folder, dataset, "test", out, stop_later)
    assert not out.exists()
    parts = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "scores.parquet.parts").glob("*.parquet")
    }
    assert len(parts) == 2
    with pytest.raises(ConfigError, match="begun with another checkpoint, data or split"):
        score_split(predictor, folder, dataset, "train", out)
    assert {path: path.stat().st_mtime_ns for path in parts} == parts, "nothing is lost"
    assert score_split(predictor, folder, dataset, "test", out).num_kept == 200
    fresh = score_split(predictor, folder, dataset, "test", tmp_path / "fresh.parquet")
    assert fresh.num_kept == 0
    assert read(out).equals(read(tmp_path / "fresh.parquet"))


def test_the_command_scores_and_refuses_what_it_cannot_do(run, data, tmp_path):
    def predict(*more):
        return CliRunner().invoke(
            app, ["predict", "--checkpoint", str(run), "--data", str(data), *map(str, more)]
        )

    ran = predict("--out", tmp_path / "scores.csv", "--split", "validation")
    assert ran.exit_code == 0, ran.output
    rows = read(tmp_path / "scores.csv")
    assert f"{len(rows):,} scores in" in ran.output
    for more, message in (
        (("--out", tmp_path / "scores.csv"), "which is there already"),
        (("--out", tmp_path / "scores.txt"), "ends in .parquet or .csv"),
        (("--out", tmp_path / "none" / "scores.csv"), "which is no folder"),
        (("--out", tmp_path / "other.csv", "--split", "tset"), "split 'tset'"),
    ):
        ran = predict(*more)
        assert ran.exit_code != 0
        assert message in str(ran.exception)
    assert len(read(tmp_path / "scores.csv")) == len(rows)
