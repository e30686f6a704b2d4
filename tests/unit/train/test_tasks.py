"""Runs with several labels, weights, groups and numbers, from the recipe to scores."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

import pibroch as pb
from pibroch.collectives.ranks import Channel, Ranks
from pibroch.data import EncodedDataset, JaggedBatch, Loader
from pibroch.data.schema import Schema
from pibroch.errors import ConfigError
from pibroch.observability.report import write_report
from pibroch.score.checkpoint import evaluate_checkpoint, open_for
from pibroch.score.split import score_split
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.train.criterion import Criterion
from pibroch.train.monitored import check_monitor, value_of
from several_labels import SCHEMA, prepared
from small_run import make_config, run_command, train_here

SMALL = (
    "model.top=[16]",
    "model.expert_hidden=[16]",
    "model.batch_norm=false",
    "model.dropout=0.0",
    "train.log_every=5",
    "train.evaluate_batch_size=90",
)
TASKS = ("model.name=mmoe", "tasks={seconds={loss='mse', weight=0.5}}")
ONE_NUMBER = SCHEMA.replace('labels = ["click", "seconds"]', 'label = "seconds"').replace(
    "[target.click]\nvalues = { no = 0, yes = 1 }\n", ""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = prepared(folder, count=3000)
    config = make_config(data, *SMALL, *TASKS, "train.epochs=8", "train.monitor=seconds:rmse")
    run, result = train_here(config, folder / "run")
    return SimpleNamespace(data=data, run=run, result=result, folder=folder)


def test_both_tasks_are_learned_and_told(trained):
    evaluations = [each for each in trained.run.metrics() if each["kind"] == "evaluation"]
    best = min(
        (each for each in evaluations if each["split"] == "validation"),
        key=lambda each: each["tasks"]["seconds"]["rmse"],
    )
    assert best["is_best"]
    told = json.loads((trained.run.path / "evaluation.json").read_text())["tasks"]
    names = ["auc", "logloss", "normalized_entropy", "calibration"]
    names += ["pr_auc", "gauc", "ndcg@10", "hr@10"]
    assert list(told["click"]) == [*names, *(f"{name}_unweighted" for name in names)]
    assert list(told["seconds"]) == ["rmse", "mae", "rmse_unweighted", "mae_unweighted"]
    assert told["click"]["auc"] == trained.result.summary.auc > 0.8
    assert told["click"]["gauc"] > 0.75 and told["seconds"]["rmse"] < 0.7


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize(("click", "seconds"), [(1, 1), (0.25, 1), (1, 3), (0, 2)])
def test_each_tasks_loss_counts_by_its_weight(tmp_path, loss, click, seconds):
    """In the sum and in the gradients, beside what each task alone says."""
    labels = torch.tensor([[0.0, 1.5], [1.0, -0.5], [1.0, 2.0], [0.0, 0.0]])
    ids = torch.zeros(1, 4, dtype=torch.int64)
    batch = JaggedBatch.from_one_hot(torch.empty(4, 0), ["user"], ids, labels)
    batch = replace(batch, groups=torch.tensor([0, 0, 1, 1]))

    def loss_of(of_click, of_seconds):
        tasks = f"click={{loss='{loss}', weight={of_click}}}"
        tasks += f", seconds={{loss='mse', weight={of_seconds}}}"
        config = make_config(tmp_path, "model.name=mmoe", f"tasks={{{tasks}}}")
        logits = torch.tensor(
            [[0.5, 1.0], [-1.0, 0.0], [2.0, -1.0], [0.1, 0.3]], requires_grad=True
        )
        criterion = Criterion(config, Schema.from_toml(SCHEMA), Channel(Ranks.alone()))
        value = criterion(logits, batch)
        value.backward()
        return torch.cat([value.detach()[None], logits.grad.flatten()])

    alone = loss_of(1, 0), loss_of(0, 1)
    assert alone[0][0] > 0.1 and alone[1][0] > 0.1
    torch.testing.assert_close(loss_of(click, seconds), click * alone[0] + seconds * alone[1])


def test_figures_are_those_of_the_scores(trained):
    dataset = EncodedDataset.open(trained.data)
    evaluation = evaluate_checkpoint(trained.run.path, dataset, "test")
    out = trained.folder / "scores.parquet"
    score_split(*open_for(trained.run.path, dataset), dataset, "test", out)
    frame = pl.read_parquet(out)
    names = ["label.click", "score.click", "logit.click"]
    names += [name.replace("click", "seconds") for name in names]
    assert frame.columns == ["sample", "file", "line", *names]
    errors = frame["score.seconds"].to_numpy() - frame["label.seconds"].to_numpy()
    weights = dataset.split("test").sample_weights
    for name, of_sample in {"rmse": weights, "rmse_unweighted": np.ones(len(weights))}.items():
        rmse = np.sqrt(np.average(errors.astype(np.float64) ** 2, weights=of_sample))
        assert evaluation.tasks["seconds"][name] == pytest.approx(rmse, rel=1e-6)
    click, score = (frame[f"{kind}.click"].to_numpy() for kind in ("label", "score"))
    above = score[click == 1][:, None] > score[click == 0]
    pairs = weights[click == 1][:, None] * weights[click == 0]
    assert evaluation.metrics.auc == pytest.approx((above * pairs).sum() / pairs.sum(), abs=1e-4)
    unweighted = evaluation.tasks["click"]["auc_unweighted"]
    assert unweighted == pytest.approx(above.mean(), abs=1e-4)
    assert evaluation.metrics.num_samples == len(weights) > (weights > 0).sum()


def test_either_kind_of_figure_chooses_the_best_model(trained):
    schema = EncodedDataset.open(trained.data).schema
    for monitor in ("auc", "auc_unweighted", "seconds:rmse_unweighted", "gauc_unweighted"):
        check_monitor(make_config(trained.data, f"train.monitor='{monitor}'"), schema)
    tasks = {"click": {"auc_unweighted": 0.7}, "seconds": {"rmse_unweighted": 2.0}}
    assert value_of("auc_unweighted", tasks, schema) == 0.7
    assert value_of("seconds:rmse_unweighted", tasks, schema) == -2.0
    with pytest.raises(ConfigError, match="auc_unweighted"):
        config = make_config(trained.data, "train.monitor=auc_unweighted")
        check_monitor(config, schema.model_copy(update={"weight": None}))


def test_a_report_has_both_aucs(trained):
    page = write_report(trained.run.path, trained.folder / "report.html").read_text()
    told = json.loads((trained.run.path / "evaluation.json").read_text())["tasks"]["click"]
    weighted, unweighted = (f"{told[name]:.4f}" for name in ("auc", "auc_unweighted"))
    assert weighted != unweighted and weighted in page and unweighted in page


def test_an_export_scores_both(trained):
    export_checkpoint(trained.run.path, trained.folder / "export", ExportOptions())
    dataset = EncodedDataset.open(trained.data)
    (batch, *_) = Loader(dataset.split("test"), 50)
    predictors = [pb.Predictor.open(p) for p in (trained.run.path, trained.folder / "export")]
    scores = [predictor(batch) for predictor in predictors]
    assert scores[0].shape == (50, 2) and torch.equal(*scores)
    logits = predictors[0].logits(batch)
    torch.testing.assert_close(scores[0][:, 0], logits[:, 0].double().sigmoid())
    assert torch.equal(scores[0][:, 1], logits[:, 1])
    assert predictors[1].columns == ("age", "user", "item")
    raw = [{"age": "0.5", "user": "u1", "item": "i1"}]
    assert predictors[1].score_raw(raw).shape == (1, 2)


def test_evaluate_prints_json(trained):
    arguments = ("evaluate", "--checkpoint", trained.run.path, "--data", trained.data)
    printed = json.loads(run_command(*arguments, "--json").stdout)
    assert printed["num_samples"] == 450 and printed["split"] == "test"
    told = json.loads((trained.run.path / "evaluation.json").read_text())["tasks"]
    assert printed["tasks"] == told
    line = run_command(*arguments).stdout
    assert "click auc" in line and "seconds rmse" in line


def test_a_regression(tmp_path):
    data = prepared(tmp_path, ONE_NUMBER, count=3000)
    changes = ("loss.name=mse", "train.monitor=rmse", "train.epochs=8")
    run, result = train_here(make_config(data, *SMALL, *changes), tmp_path / "run")
    told = json.loads((run.path / "evaluation.json").read_text())
    assert result.summary.auc is None and told["auc"] is None
    assert told["tasks"]["seconds"]["rmse"] < 0.7


def test_weights_of_zero_are_samples_that_are_not_there(tmp_path):
    """The loss of a step is that of the samples that have weight."""
    data = prepared(tmp_path, ONE_NUMBER)
    config = make_config(
        data, *SMALL, "loss.name=mse", "train.monitor=rmse", "train.epochs=none", "train.steps=1"
    )
    run, _ = train_here(config, tmp_path / "run")
    loader = Loader(
        EncodedDataset.open(data).split("train"), config.train.batch_size, shuffle=True, seed=3
    )
    batch = next(iter(loader))
    before = make_config(data, *SMALL, "loss.name=mse", "train.epochs=1", "train.monitor=rmse")
    from pibroch.train.session import build_session

    session = build_session(before, EncodedDataset.open(data))
    with session.predicting() as logits:
        errors = (logits(batch) - batch.labels).square().double()
    weights = batch.sample_weights.double()
    expected = (errors * weights).sum() / weights.sum()
    session.set_training(True)
    assert session.loss(batch, 1).item() == pytest.approx(expected.item(), rel=1e-5)
    assert run.metrics()[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("model.name=dlrm",), "model 'dlrm' for 2 labels; need a model of several tasks: mmoe"),
        (
            ("tasks={seconds={loss='bce'}}",),
            "loss 'bce' for the label 'seconds', which holds numbers",
        ),
        (("tasks={sold={}}",), "need a label of the data, one of click, seconds"),
        (("train.monitor=sold:auc",), "a label of the data before the colon"),
        (("train.monitor=rmse",), "for the label 'click'; need one of auc, logloss"),
        (("train.monitor=ndcg@5",), "gauc, ndcg@10, hr@10"),
    ],
)
def test_what_does_not_fit_the_data_is_said(trained, tmp_path, changes, problem):
    with pytest.raises(ConfigError) as refused:
        train_here(make_config(trained.data, *SMALL, *TASKS, *changes), tmp_path / "run")
    assert problem in str(refused.value)


def test_softmax_wants_groups(tmp_path):
    data = prepared(tmp_path, ONE_NUMBER.replace('group = "user"\n', ""), count=300)
    config = make_config(data, *SMALL, "loss.name=softmax", "train.monitor=rmse")
    with pytest.raises(ConfigError, match="'softmax' of data without groups"):
        train_here(config, tmp_path / "run")
