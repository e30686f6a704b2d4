"""Training runs of topic ``models``, each in a process of its own, and their data."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.contender import BenchmarkError
from benchmarks.environments import fuxictr_python
from benchmarks.model_cases import ATTENTION_HIDDEN, CROSS_LAYERS, GATE_HIDDEN, ModelCase
from benchmarks.small_runs import peer, pibroch
from benchmarks.workloads import SAMPLE_NAME, sample_path
from pibroch.config.recipes import check_config
from pibroch.config.run import RunConfig
from pibroch.config.toml import to_toml
from pibroch.data import EncodedDataset
from pibroch.data.presets import criteo_schema
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import DataError

LONGEST_HISTORY = 20
MOST_SCORE_GAP = 1e-5
"""Between the scores of one model on both sides: both compute in float32."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave.

    Attributes:
        auc: of the test split, by the epoch that was best on the validation split.
        epochs: that were trained.
        samples_per_second: of the quickest epoch, from asking for its first batch to the end of its
            last step; without evaluation.
        score_gap: largest difference of a score where both sides have the same weights; ``None``
            where they were not compared.
        versions: that matter for speed.
    """

    auc: float
    epochs: int
    samples_per_second: float
    score_gap: float | None = None
    versions: dict[str, str] = field(default_factory=dict)


def criteo_sample(folder: Path, num_samples: int | None) -> EncodedDataset:
    """The Criteo sample in 39 categorical columns, integers in bins, as FuxiCTR has it.

    Args:
        folder: to write to.
        num_samples: the first so many; all when absent.

    Raises:
        DataError: when the sample is absent.
    """
    path = sample_path()
    if path is None:
        raise DataError(
            f"no {SAMPLE_NAME}", "the Criteo sample", "set PIBROCH_TEST_DATA to its folder"
        )
    lines = folder.with_suffix(".tsv")
    with gzip.open(path, "rt") as sample, lines.open("w") as file:
        file.writelines(islice(sample, num_samples))
    schema = folder.with_suffix(".toml")
    schema.write_text(criteo_schema().model_copy(update={"dense": ()}).to_toml())
    pibroch("data", "prepare", "criteo", lines, "--schema", schema, "--out", folder)
    return EncodedDataset.open(folder)


def generated_histories(folder: Path, num_samples: int) -> EncodedDataset:
    """Criteo-shaped samples with sequences, whose best possible AUC is known."""
    synthesize(SyntheticOptions(num_samples, history=LONGEST_HISTORY), folder)
    return EncodedDataset.open(folder)


def recipe(case: ModelCase, dataset: EncodedDataset) -> dict[str, Any]:
    """The case as a recipe of pibroch's."""
    optimizer = {"name": case.optimizer, "lr": case.lr}
    steps_per_epoch = math.ceil(dataset.samples["train"] / case.batch_size)
    model: dict[str, Any] = {"name": case.model, "dim": case.dim, "top": case.top}
    if case.model == "din":
        model |= {
            "attention_hidden": ATTENTION_HIDDEN,
            "max_length": LONGEST_HISTORY,
            "histories": {
                each.name: each.table for each in dataset.schema.categorical if each.multi_hot
            },
        }
    return {
        "seed": case.seed,
        "data": {"dir": str(dataset.path)},
        "model": model | {"cross_layers": CROSS_LAYERS, "gate_hidden": GATE_HIDDEN},
        "embedding": {
            "init": {"name": "normal", "std": case.initial_std},
            "optimizer": optimizer,
        },
        "optimizer": optimizer,
        "schedule": {"plateau_factor": 0.1},
        "train": {
            "epochs": case.epochs,
            "early_stop_patience": case.patience,
            "batch_size": case.batch_size,
            "log_every": steps_per_epoch,
        },
    }


def config_of(case: ModelCase, dataset: EncodedDataset) -> RunConfig:
    """The case as pibroch resolves its recipe."""
    return check_config(recipe(case, dataset), "the benchmark")


def train_pibroch(case: ModelCase, dataset: EncodedDataset, run: Path) -> Trained:
    """As a user does; the folder ``run`` has the run afterwards.

    Raises:
        BenchmarkError: when it fails.
    """
    path = run.with_suffix(".toml")
    config = config_of(case, dataset)
    path.write_text(to_toml(config.model_dump(mode="json")))
    pibroch("train", path, "--run-dir", run, timeout_s=TIMEOUT_S)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [each["samples_per_second"] for each in records if each["kind"] == "training"]
    auc = json.loads((run / "summary.json").read_text())["auc"]
    return Trained(auc, len(rates), max(rates))


def train_fuxictr(case: ModelCase, folder: Path, start: Path, weights: Path | None) -> Trained:
    """The same in FuxiCTR.

    Args:
        case: what to train.
        folder: its data.
        start: weights with which pibroch's run began.
        weights: of pibroch's run, whose scores FuxiCTR's model must have.

    Raises:
        BenchmarkError: when it fails, or has other scores.
        MissingDependencyError: when there is no Python with FuxiCTR.
    """
    words = [case.to_json(), folder, start, *([] if weights is None else [weights])]
    python = fuxictr_python()
    trained = Trained(**peer("FuxiCTR", python, "models_fuxictr", *words, timeout_s=TIMEOUT_S))
    gap = trained.score_gap
    if gap is not None and not gap <= MOST_SCORE_GAP:
        raise BenchmarkError(
            f"scores that differ by {gap:.2g} between {case.model} of pibroch and of FuxiCTR",
            f"at most {MOST_SCORE_GAP:g} where both have the same weights",
            "nothing is reported until both are one model",
        )
    return trained
