import json
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from pibroch.config.recipes import check_config
from pibroch.data import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.storage import checksum
from pibroch.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteGradientError,
    NonFiniteLossError,
)
from pibroch.models import MODELS
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import read_manifest
from pibroch.train.run_directory import RunDirectory
from pibroch.untrusted import checksum as checksum_of
from small_run import files_below, make_config, make_dataset, train_here

SUMMARY_KEYS = {
    "steps", "samples", "seconds", "samples_per_second", "auc", "logloss", "normalized_entropy",
    "exchange", "world_size", "bytes_sent", "bytes_received", "cache_hit_rate", "lookahead",
    "bytes_by_purpose", "bytes_by_link", "peak_rss_bytes", "restarts", "timed_checkpoints",
    "timed_checkpoint_seconds", "memory_cuts", "memory_cut_seconds",
    "versions_published", "publishing_seconds", "tasks", "raw_ids", "transfers_spared",
}  # fmt: skip


def test_a_run_leaves_what_the_design_lists(data, tmp_path):
    config = make_config(data)
    run, result = train_here(config, tmp_path / "run")
    summary = run.read_json("summary.json")
    assert set(summary) == SUMMARY_KEYS
    assert (
        summary["steps"] == 42
        and summary["samples"] == 4200
        and summary["auc"] == result.summary.auc > 0.5
    )
    assert (
        summary["cache_hit_rate"]
        is summary["lookahead"]
        is summary["bytes_by_purpose"]
        is summary["bytes_by_link"]
        is None
    )
    assert summary["exchange"] == "local"
    assert (
        check_config(tomllib.loads((run.path / "config.toml").read_text()), "config.toml") == config
    )
    assert run.read_json("versions.json")["torch"] == torch.__version__
    records = run.metrics()
    assert [r["step"] for r in records if r["kind"] == "training"] == list(range(1, 43))
    assert [
        r["step"] for r in records if r["kind"] == "evaluation" and r["split"] == "validation"
    ] == [
        10,
        20,
        30,
        40,
        42,
    ]
    assert 0.5 < result.best_possible_auc <= 1


def test_the_newest_and_the_best_checkpoints_are_kept(data, tmp_path):
    run, result = train_here(make_config(data, "train.keep=1"), tmp_path / "run")
    folder = CheckpointFolder(run.checkpoints_path, keep=1)
    evaluations = [
        r for r in run.metrics() if r["kind"] == "evaluation" and r["split"] == "validation"
    ]
    best_step = max(evaluations, key=lambda r: r["auc"])["step"]
    assert folder.steps() == sorted({best_step, 42})
    assert folder.best() == folder.path(best_step)
    assert (
        evaluate_checkpoint(run.path, EncodedDataset.open(data), "test").metrics.auc
        == result.summary.auc
    )


def test_early_stop_and_plateau(data, tmp_path):
    overrides = [
        "train.early_stop_patience=2",
        "train.epochs=50",
        "train.evaluate_every=3",
        "schedule.plateau_factor=0.5",
    ]
    run, result = train_here(make_config(data, *overrides, "optimizer.lr=0.5"), tmp_path / "run")
    monitor = read_manifest(CheckpointFolder(run.checkpoints_path, 2).latest()).progress.monitor
    assert (
        monitor.evaluations_since_best == 2 and result.summary.steps == monitor.best_step + 6 < 1000
    )
    rates = {r["step"]: r["learning_rate"] for r in run.metrics() if r["kind"] == "training"}
    assert rates[monitor.best_step + 4] == rates[monitor.best_step] * 0.5


def test_equal_runs_write_equal_bytes_and_training_again_continues(data, tmp_path):
    common = ["train.keep=9", "train.evaluate_every=7"]  # the shorter run also evaluates at its end
    long = make_config(data, "train.steps=20", *common)
    first, _ = train_here(long, tmp_path / "a")
    train_here(make_config(data, "train.steps=14", *common), tmp_path / "b")
    second, result = train_here(long, tmp_path / "b")
    assert result.summary.steps == 20 and result.summary.samples == 2000
    assert files_below(first.checkpoints_path / "step-00000020") == files_below(
        second.checkpoints_path / "step-00000020"
    )
    losses = [
        [(r["step"], r["loss"]) for r in run.metrics() if r["kind"] == "training"]
        for run in (first, second)
    ]
    assert losses[0] == losses[1]


def test_a_non_finite_loss_names_the_step_and_is_never_saved(data, tmp_path):
    overrides = [
        "embedding.optimizer={name='sgd', lr=1e30}",
        "train.checkpoint_every=1",
        "model.batch_norm=false",
    ]
    with pytest.raises(NonFiniteLossError, match=r"loss \S+ in step (\d+)") as failure:
        train_here(make_config(data, *overrides), tmp_path / "run")
    step = int(failure.value.got.split()[-1])
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", 2)
    assert folder.latest() == folder.path(step - 1)
    assert read_manifest(folder.latest()).progress.step == step - 1


@pytest.mark.parametrize("passes", [(), ("train.batch_size=25", "train.accumulate=4")])
def test_a_gradient_that_is_not_finite_names_the_step_and_is_never_saved(data, tmp_path, passes):
    """In any of a step's passes."""
    overrides = [
        "loss={name='edge_loss:Edge'}",
        "embedding.optimizer={name='sgd', lr=1e4}",
        "train.checkpoint_every=1",
        "model.batch_norm=false",
        *passes,
    ]
    with pytest.raises(NonFiniteGradientError, match=r"in step (\d+): of .* 'C\d+'") as failure:
        train_here(make_config(data, *overrides), tmp_path / "run")
    step = int(re.search(r"in step (\d+)", failure.value.got)[1])
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", 2)
    assert step > 1 and folder.latest() == folder.path(step - 1)


def test_averages_are_what_is_evaluated(data, tmp_path):
    run, result = train_here(make_config(data, "train.average=0.9"), tmp_path / "run")
    _, plain = train_here(make_config(data), tmp_path / "plain")
    assert result.summary.auc != plain.summary.auc
    losses = [
        [r["loss"] for r in RunDirectory(path).metrics() if r["kind"] == "training"]
        for path in (run.path, tmp_path / "plain")
    ]
    assert losses[0] == losses[1]
    assert (
        evaluate_checkpoint(run.path, EncodedDataset.open(data), "test").metrics.auc
        == result.summary.auc
    )


def test_bf16_and_clipping_train(data, tmp_path):
    _, result = train_here(
        make_config(data, "train.bf16=true", "train.clip_norm=0.1"), tmp_path / "run"
    )
    assert result.summary.auc > 0.5


@pytest.mark.parametrize("name", sorted(n for n in MODELS.keys() - {"dlrm"} if MODELS[n].pools))
def test_each_model_trains(data, tmp_path, name):
    _, result = train_here(
        make_config(data, f"model.name={name}", "train.epochs=3"), tmp_path / "run"
    )
    assert result.summary.auc > 0.52


def test_every_byte_of_a_checkpoint_counts(data, tmp_path):
    run, _ = train_here(make_config(data, "train.steps=2"), tmp_path / "run")
    dataset = EncodedDataset.open(data)
    checkpoint = CheckpointFolder(run.checkpoints_path, 2).latest()
    for path in sorted(checkpoint.rglob("*.*")):
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 2):
            path.write_bytes(
                content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
            )
            with pytest.raises(CheckpointError, match=path.name):
                evaluate_checkpoint(checkpoint, dataset, "test")
        path.write_bytes(content)
    evaluate_checkpoint(checkpoint, dataset, "test")


def test_a_checkpoint_of_other_data_is_refused(data, tmp_path):
    config = make_config(data, "train.steps=2")
    run, _ = train_here(config, tmp_path / "run")
    wide = make_dataset(tmp_path / "wide", num_samples=1000, max_table_rows=41)
    with pytest.raises(CheckpointError, match=r"table 'C\d+' with 42 rows x 4 .* need 43 rows x 4"):
        evaluate_checkpoint(run.path, EncodedDataset.open(wide), "test")
    longer = make_dataset(tmp_path / "longer", num_samples=3001, max_table_rows=40)
    with pytest.raises(CheckpointError, match="other samples or labels"):
        train_here(make_config(longer, "train.steps=4"), run.path)


def test_a_used_directory_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        RunDirectory(tmp_path).must_be_new()


def test_metrics_survive_a_cut_line_and_forget_what_comes_after(tmp_path):
    run = RunDirectory(tmp_path)
    lines = [json.dumps({"kind": "training", "step": s, "seconds": s / 2}) for s in (1, 2, 3)]
    run.metrics_path.write_text("\n".join(lines) + '\n{"kind": "tra')
    assert run.truncate_metrics(2) == 1.0
    assert [record["step"] for record in run.metrics()] == [1, 2]


def test_data_of_equal_sizes_and_other_vocabularies_are_refused(tmp_path):
    """Each value has another row there: scores would be noise, with an exit code of 0."""
    schema = Schema(
        label="click",
        columns=("click", "city"),
        separator=",",
        categorical=[{"name": "city", "column": "city", "max_rows": 12, "min_count": 1}],
    )
    datasets = []
    for number, towns in enumerate((range(20), range(20, 40))):
        random = np.random.default_rng(number)
        path = tmp_path / f"{number}.csv"
        path.write_text(
            "".join(f"{int(town % 3 == 0)},town{town}\n" for town in random.choice(towns, 2000))
        )
        source = TextSource(path, schema.separator, schema.quotes, schema.columns)
        prepare(
            [source],
            schema,
            tmp_path / f"data{number}",
            PrepareOptions(),
            lambda stage, fraction: None,
        )
        datasets.append(tmp_path / f"data{number}")
    own, other = map(EncodedDataset.open, datasets)
    assert own.num_rows == other.num_rows == {"city": 12}
    run, _ = train_here(
        make_config(datasets[0], "train.epochs=1", "model.bottom=[4]"), tmp_path / "run"
    )
    assert evaluate_checkpoint(run.path, own, "test").metrics.num_samples > 0
    with pytest.raises(
        CheckpointError, match="whose vocabularies or encodings are not the checkpoint's"
    ):
        evaluate_checkpoint(run.path, other, "test")


def test_a_run_does_not_go_on_with_flipped_labels(data, tmp_path):
    run, _ = train_here(make_config(data, "train.steps=4"), tmp_path / "run")
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    longer = make_config(copy, "train.steps=6")
    labels = copy / "train" / "labels.u8"
    labels.write_bytes(bytes(1 - label for label in labels.read_bytes()))
    manifest = json.loads((copy / "dataset.json").read_text())
    manifest["files"]["train/labels.u8"][1] = checksum(labels)
    (copy / "dataset.json").write_text(json.dumps(manifest))
    assert EncodedDataset.open(copy).fingerprint == EncodedDataset.open(data).fingerprint
    with pytest.raises(CheckpointError, match="other samples or labels"):
        train_here(longer, run.path)
    shutil.rmtree(copy)
    shutil.copytree(data, copy)
    assert train_here(longer, run.path)[1].summary.steps == 6, "a true copy is as good"


def test_a_checkpoint_of_before_exchanges_had_sections_is_read(data, tmp_path):
    """A run as it was saved before: settings of all exchanges beside ``exchange``.

    Its manifest has no digest of the data.
    """
    run, _ = train_here(
        make_config(data, "train.steps=4", "embedding.exchange=auto"), tmp_path / "run"
    )
    path = run.checkpoints_path / "step-00000004" / "manifest.json"
    content = json.loads(path.read_text())
    old = {
        "exchange": "auto",
        "placement": "table_wise",
        "plan": None,
        "wire": "bfloat16",
        "compress": False,
        "lookahead": None,
        "cache_rows": None,
        "cache": "lrpp",
        "delayed_sync": True,
        "servers": None,
        "oracle": "replicated",
        "meet": None,
    }
    del content["sha256"], content["dataset_digest"]
    content["config"]["embedding"] |= old
    path.write_text(json.dumps(content | {"sha256": checksum_of(content)}))
    section = read_manifest(path.parent).config.embedding.exchange
    assert (section.name, section.placement, section.wire) == ("auto", "table_wise", "bfloat16")
    assert train_here(make_config(data, "train.steps=6"), run.path)[1].summary.steps == 6
