"""Scores in a file: those of evaluation, in the split's order.

A run that was cut off goes on, and nothing is overwritten.
"""

import json
import shutil

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from pibroch.cli.main import app
from pibroch.data import EncodedDataset, Loader
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.storage import checksum
from pibroch.data.targets import scores_of_logits
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import ConfigError
from pibroch.score.checkpoint import evaluate_checkpoint, open_for
from pibroch.score.split import score_split
from pibroch.serve.export import ExportOptions, SavedRows, export_checkpoint
from pibroch.serve.inputs import encoded_tensors
from pibroch.serve.predictor import Predictor
from pibroch.serve.whole_model import WholeModel
from pibroch.state.manifest import MANIFEST, read_manifest
from raw_clicks import prepared, raw_rows
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
    np.testing.assert_array_equal(actual["score"].to_numpy(), expected)
    logits = np.concatenate([predictor.logits(batch).numpy() for batch in batches])
    np.testing.assert_array_equal(actual["logit"].cast(pl.Float32).to_numpy(), logits)
    assert actual["label"].to_list() == [
        label for batch in batches for label in batch.labels.tolist()
    ]
    evaluation = evaluate_checkpoint(run, dataset, "test", tmp_path / f"again-{name}")
    assert read(tmp_path / f"again-{name}").equals(actual)
    order = actual["score"].to_numpy()
    positive = order[actual["label"].to_numpy() == 1]
    negative = order[actual["label"].to_numpy() == 0]
    above = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    assert evaluation.metrics.auc == pytest.approx(above, abs=1e-9)
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


def test_parts_of_another_version_or_checkpoint_are_not_gone_on_with(run, data, tmp_path):
    out = tmp_path / "scores.parquet"
    dataset = EncodedDataset.open(data)
    predictor, checkpoint = open_for(run, dataset)

    def stop(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_split(predictor, checkpoint, dataset, "test", out, stop)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pibroch.score.split.__version__", "another")
        with pytest.raises(ConfigError, match="begun with another checkpoint"):
            score_split(predictor, checkpoint, dataset, "test", out)
    other = shutil.copytree(checkpoint, tmp_path / "other")
    (other / MANIFEST).write_bytes((other / MANIFEST).read_bytes() + b" ")
    with pytest.raises(ConfigError, match="begun with another checkpoint"):
        score_split(predictor, other, dataset, "test", out)
    score_split(predictor, checkpoint, dataset, "test", out)


def test_parts_of_data_that_were_replaced_are_scored_anew(run, data, tmp_path, caplog):
    """Equal schema, dictionaries and numbers of samples are not enough."""
    folder = shutil.copytree(data, tmp_path / "data")
    out = tmp_path / "scores.parquet"

    def score(path, advance=lambda _: None):
        dataset = EncodedDataset.open(path)
        predictor, checkpoint = open_for(run, dataset)
        return score_split(predictor, checkpoint, dataset, "test", out, advance)

    scored = []

    def stop(count):
        scored.append(count)
        if sum(scored) > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(folder, stop)
    before = EncodedDataset.open(folder)
    other = shutil.copytree(data, tmp_path / "other")
    labels = other / "test" / "labels.u8"
    labels.write_bytes(bytes(1 - label for label in labels.read_bytes()))
    manifest = json.loads((other / "dataset.json").read_text())
    manifest["files"]["test/labels.u8"][1] = checksum(labels)
    (other / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="begun with another checkpoint, data or split"):
        score(other)
    shutil.rmtree(folder)
    shutil.move(other, folder)
    after = EncodedDataset.open(folder)
    assert (before.fingerprint, before.samples) == (after.fingerprint, after.samples)
    assert score(folder).num_kept == 0
    assert "has changed since the parts" in caplog.text
    labels = pl.read_parquet(out)["label"].to_numpy()
    np.testing.assert_array_equal(labels, after.split("test").labels)


@pytest.mark.parametrize("loss", ["pairwise", "mse"])
def test_a_loss_without_probabilities_has_logits_for_scores(data, tmp_path, loss):
    changes = f"loss.name={loss}", "train.steps=5", "train.evaluate_batch_size=200"
    run, _ = train_here(make_config(data, *changes), tmp_path / "run")
    dataset = EncodedDataset.open(data)
    predictor, folder = open_for(run.path, dataset)
    score_split(predictor, folder, dataset, "test", tmp_path / "scores.parquet")
    scores = read(tmp_path / "scores.parquet")
    assert scores["score"].equals(scores["logit"].cast(pl.Float64))
    export_checkpoint(run.path, tmp_path / "export", ExportOptions())
    (batch, *_) = Loader(dataset.split("test"), 200)
    for path in (run.path, tmp_path / "export"):
        scored = Predictor.open(path)(batch)
        assert scored.tolist() == scores["score"][: len(scored)].to_list()
    whole = WholeModel.of(SavedRows.of(folder, read_manifest(folder)))
    tensors = encoded_tensors(dataset.schema, batch)
    assert torch.equal(*whole(*tensors.values()))


def test_scores_keep_the_order_of_logits():
    schema = Schema.from_toml('label = "y"\n[categorical.u]\n')
    logits = np.linspace(-90, 22, 1000, dtype=np.float32)
    scores = scores_of_logits(logits, schema)
    assert (np.diff(scores) > 0).all() and scores[-1] < 1
    assert np.isfinite(scores_of_logits(np.float32([-3e38, 3e38]), schema)).all()
    two = Schema.from_toml('labels = ["y", "z"]\n[categorical.u]\n')
    both = scores_of_logits(np.float32([[2, 2]]), two, ("z",))
    assert both[0, 1] == 2 and both[0, 0] == pytest.approx(1 / (1 + np.exp(-2)))


def test_the_file_says_which_line_each_score_is_of(tmp_path):
    """Behind malformed ones, too, with columns that were passed through."""
    trained = EncodedDataset.open(prepared(tmp_path / "data", raw_rows(300)))
    config = make_config(trained.path, "train.steps=2", "train.evaluate_batch_size=50")
    run, _ = train_here(config, tmp_path / "run")
    prices = ["n/a" if number == 3 else number for number in range(200)]
    lines = [f"{price},20,u1,c,1,t1,id{number}\n" for number, price in enumerate(prices)]
    (tmp_path / "new.csv").write_text("price,age,user,city,slot,tags,id\n" + "".join(lines))
    options = PrepareOptions(
        SplitRule.parse("test"),
        0.1,
        vocabularies=Vocabularies.of_dataset(trained),
        has_labels=False,
        keep=("id",),
    )
    source = TextSource(tmp_path / "new.csv", ",", True)
    prepare([source], trained.schema, tmp_path / "new", options)
    dataset = EncodedDataset.open(tmp_path / "new")
    predictor, folder = open_for(run.path, dataset)
    score_split(predictor, folder, dataset, "test", tmp_path / "scores.csv")
    rows = read(tmp_path / "scores.csv")
    assert rows.columns == ["sample", "file", "line", "id", "label", "score", "logit"]
    numbers = [number for number in range(200) if number != 3]
    assert rows["id"].to_list() == [f"id{number}" for number in numbers]
    assert rows["line"].to_list() == [number + 2 for number in numbers]
    assert rows["file"].unique().to_list() == [str(tmp_path / "new.csv")]


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
