"""Labels that are all alike, and predictions that are no numbers.

What a run does when a figure is not defined.
"""

import logging
import math

import numpy as np
import pytest

from pibroch.data import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import NonFiniteLossError
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.train.metrics import Predictions
from small_run import make_config, run_command, train_here

SETTINGS = [
    "model.bottom=[4]",
    "model.batch_norm=false",
    "train.batch_size=50",
    "train.epochs=6",
    "train.evaluate_every=2",
    "schedule.plateau_factor=0.5",
    "train.early_stop_patience=3",
]


@pytest.fixture(scope="module")
def prepare_clicks(tmp_path_factory):
    """Of 300 samples the first ``num_mixed`` have labels of both kinds, all others 0."""
    folder = tmp_path_factory.mktemp("clicks")
    schema = Schema(
        label="click",
        columns=("click", "city"),
        separator=",",
        categorical=[{"name": "city", "column": "city", "min_count": 1}],
    )

    def make(num_mixed):
        path = folder / str(num_mixed)
        text = folder / f"{num_mixed}.csv"
        if not path.exists():
            text.write_text(
                "".join(f"{int(k % 3 == 0 and k < num_mixed)},town{k % 9}\n" for k in range(300))
            )
            source = TextSource(text, schema.separator, schema.quotes, schema.columns)
            options = PrepareOptions(SplitRule.parse("time:0.6/0.2/0.2"))
            prepare([source], schema, path, options, lambda stage, fraction: None)
        return path

    return make


def test_one_kind_of_validation_labels_neither_lowers_rates_nor_ends_a_run(
    prepare_clicks, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING, "pibroch"):
        run, result = train_here(make_config(prepare_clicks(180), *SETTINGS), tmp_path / "run")
    assert "all validation labels are 0" in caplog.text and "monitor=logloss" in caplog.text
    assert "all test labels are 0" in caplog.text and "all train labels" not in caplog.text
    assert result.summary.steps == 24 and result.summary.auc is None
    rates = {each["learning_rate"] for each in run.metrics() if each["kind"] == "training"}
    assert rates == {0.01}
    folder = CheckpointFolder(run.checkpoints_path, 2)
    assert folder.best() is None and folder.latest() == folder.path(24)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pibroch"):
        again = evaluate_checkpoint(
            run.path, EncodedDataset.open(prepare_clicks(180)), "test"
        ).metrics
    assert "AUC is not defined" in caplog.text
    assert math.isnan(again.auc) and again.logloss == result.summary.logloss


def test_log_loss_does_without_labels_of_both_kinds(prepare_clicks, tmp_path, caplog):
    config = make_config(prepare_clicks(180), *SETTINGS, "train.monitor=logloss")
    with caplog.at_level(logging.WARNING, "pibroch"):
        run, _ = train_here(config, tmp_path / "run")
    assert "validation labels" not in caplog.text
    assert CheckpointFolder(run.checkpoints_path, 2).best() is not None


def test_one_kind_of_training_labels_is_said(prepare_clicks, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pibroch"):
        train_here(make_config(prepare_clicks(0), *SETTINGS, "train.epochs=1"), tmp_path / "run")
    assert "all train labels are 0" in caplog.text and "check the schema's label" in caplog.text


def test_predictions_that_are_no_numbers_stop_a_run(prepare_clicks, tmp_path):
    """The loss of the one step is finite, the weights after it are not."""
    changes = ["train.epochs=1", "train.batch_size=200", "optimizer.name=sgd", "optimizer.lr=1e38"]
    with pytest.raises(NonFiniteLossError, match="over the validation split"):
        train_here(make_config(prepare_clicks(300), *SETTINGS, *changes), tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_auc_of_what_is_no_number_is_none():
    predictions = Predictions()
    predictions.add(np.array([0.1, np.nan, 2.0], np.float32), np.array([0, 1, 1], np.float32))
    result = predictions.result().metrics
    assert math.isnan(result.auc) and math.isnan(result.logloss)


def test_evaluate_says_in_words_that_auc_is_undefined(prepare_clicks, tmp_path):
    data = prepare_clicks(200)
    run, _ = train_here(make_config(data, *SETTINGS, "train.epochs=1"), tmp_path / "run")
    done = run_command("evaluate", "--checkpoint", run.path, "--data", data)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("test AUC undefined  logloss 0.")
    assert "nan" not in done.stdout
    said = " ".join(done.stderr.split())
    assert "all labels of the test split are 0: AUC is not defined" in said
