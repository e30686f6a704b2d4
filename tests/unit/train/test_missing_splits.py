"""Data without validation or test samples train, without what those would be for."""

import json
import logging
import sys
from contextlib import suppress

import numpy as np
import pytest

from pibroch.cli.main import main
from pibroch.config import to_toml
from pibroch.data import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError, DataError
from pibroch.observability.report import write_report
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import make_config, run_command, train_here

SMALL = ["model.bottom=[4]", "train.batch_size=50", "train.epochs=2"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """``prepared(split)`` gives 300 samples of one feature in these shares."""
    folder = tmp_path_factory.mktemp("prepared")
    schema = Schema(
        label="click",
        columns=("click", "city"),
        separator=",",
        categorical=[{"name": "city", "column": "city", "min_count": 1}],
    )
    towns = np.random.default_rng(0).integers(0, 9, 300)
    (folder / "clicks.csv").write_text(
        "".join(f"{int(town % 3 == 0)},town{town}\n" for town in towns)
    )

    def make(split):
        path = folder / split.replace("/", "-").replace(":", "-")
        if not path.exists():
            source = TextSource(
                folder / "clicks.csv", schema.separator, schema.quotes, schema.columns
            )
            options = PrepareOptions(SplitRule.parse(split))
            prepare([source], schema, path, options, lambda stage, fraction: None)
        return path

    return make


def test_without_validation_the_last_model_is_kept_and_tested(prepared, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pibroch"):
        run, result = train_here(make_config(prepared("time:0.8/0/0.2"), *SMALL), tmp_path / "run")
    assert "no validation samples in" in caplog.text and "no test" not in caplog.text
    assert result.summary.steps == 10 and result.summary.auc is not None
    folder = CheckpointFolder(run.checkpoints_path, 2)
    assert folder.best() is None and folder.latest() == folder.path(10)
    assert [record["split"] for record in run.metrics() if record["kind"] == "evaluation"] == [
        "test"
    ]
    again = evaluate_checkpoint(run.path, EncodedDataset.open(prepared("time:0.8/0/0.2")), "test")
    assert again.metrics.auc == result.summary.auc


def test_without_test_samples_nothing_is_tested(prepared, tmp_path, caplog):
    data = prepared("time:0.8/0.2/0")
    with caplog.at_level(logging.WARNING, "pibroch"):
        run, result = train_here(make_config(data, *SMALL), tmp_path / "run")
    assert "no test samples in" in caplog.text and "no validation" not in caplog.text
    assert result.summary.steps == 10 and result.summary.auc is result.best_possible_auc is None
    assert CheckpointFolder(run.checkpoints_path, 2).best() is not None
    evaluation = json.loads((run.path / "evaluation.json").read_text())
    assert "auc" not in evaluation and evaluation["access_skew"]["row_share"]
    assert "not evaluated" in write_report(run.path, tmp_path / "page.html").read_text()
    with pytest.raises(DataError, match=r"no test samples in .*pass another --split"):
        evaluate_checkpoint(run.path, EncodedDataset.open(data), "test")


def test_a_test_split_that_is_not_read_is_no_undefined_figure(
    prepared, tmp_path, monkeypatch, capsys
):
    config = make_config(prepared("time:0.8/0/0.2"), *SMALL, "train.evaluate_test=false")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config.model_dump(mode="json")))
    words = ["pibroch", "train", str(recipe), "--run-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", words)
    with suppress(SystemExit):
        main()
    printed = capsys.readouterr()
    assert printed.out.startswith("test split not read  "), printed.err


def test_all_samples_may_train(prepared, tmp_path):
    data = prepared("none")
    arguments = [
        "--data",
        data,
        "--set",
        "train.epochs=1",
        "--set",
        "train.batch_size=100",
        "--set",
        "model.bottom=[4]",
    ]
    recipe = tmp_path / "r.toml"
    recipe.write_text("[model]\ndim = 4\ntop = [8]\n[train]\nepochs = 9\n")
    ended = run_command("train", recipe, *arguments, "--run-dir", tmp_path / "run")
    assert ended.returncode == 0 and ended.stdout.startswith("no test samples  "), ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("change", "off"),
    [
        ("train.early_stop_patience=2", "train.early_stop_patience=none"),
        ("schedule.plateau_factor=0.5", "schedule.plateau_factor=1.0"),
    ],
)
def test_what_goes_by_validation_is_refused_without_it(prepared, tmp_path, change, off):
    config = make_config(prepared("none"), *SMALL, change)
    with pytest.raises(ConfigError, match="with no validation samples in") as refused:
        train_here(config, tmp_path / "run")
    assert f"--set {off}" in refused.value.do
    assert (
        train_here(make_config(prepared("none"), *SMALL, change, off), tmp_path / "other")[
            1
        ].summary.steps
        == 12
    )


def test_without_training_samples_nothing_is_trained(data, tmp_path):
    dataset = EncodedDataset.open(data)
    dataset.samples["train"] = 0
    from pibroch.train.evaluation import check_splits

    with pytest.raises(DataError, match="no training samples"):
        check_splits(make_config(data), dataset)
