"""What towers do to a model's quality.

Tables 3 to 5 on Criteo's sample or generated data, Table 6 on planted groups.

Every run is a whole training run on one rank: a tower is a property of the model, and exchanges
change nothing but rounding.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environments import our_python
from benchmarks.plots import PlotSpec
from benchmarks.registry import Options
from benchmarks.results import Row
from benchmarks.workloads import sample_path
from pibroch.config import RunConfig
from pibroch.config.recipes import change_config, check_config
from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, planted_groups, synthesize
from pibroch.models import build_model, training_flops
from pibroch.observability.records import FanOut
from pibroch.planner.towers import Balance, Strategy
from pibroch.score.checkpoint import open_for
from pibroch.score.tower_groups import group_features
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory

SEEDS = 9
QUALITY = "quality"
GROUPS = "groups"
PLOTS = {
    QUALITY: PlotSpec(
        "auc", ("data",), "family", "model", "AUC", "auc_least", "auc_most", decimals=4, ours=""
    ),
    GROUPS: PlotSpec(
        "auc",
        ("data",),
        "family",
        "groups",
        "AUC",
        "auc_least",
        "auc_most",
        decimals=4,
        ours="learned by deepfm, coherent",
    ),
}
SAMPLES = 1_000_000
PLANTED_SAMPLES = 300_000
TOWERS = (2, 4, 8)
DIM = 16
LEARNED: tuple[tuple[str, Strategy], ...] = (
    ("deepfm", "coherent"),
    ("deepfm", "diverse"),
    ("dlrm", "coherent"),
)
"""Models whose embeddings are compared, and what features of a group are to each other."""
PLANTED_SETTINGS = "model.dim=8", "train.epochs=3"
Overrides = Sequence[str]


def quality(options: Options) -> tuple[list[Row], list[str]]:
    """AUC of DLRM and DCN by number of towers and by compression.

    Also of towers that pass their embeddings through.
    """
    dataset, name = _dataset(options)
    width = DIM // 2
    variants: dict[str, tuple[str, Overrides]] = {
        "DLRM": ("DLRM", ["model.name=dlrm"]),
        "DLRM, pass-through": (
            "DLRM",
            ["model.name=tower_dlrm", "model.towers={count=8, pass_through=true}"],
        ),
        "DCN": ("DCN", ["model.name=dcnv2", "model.structure=stacked"]),
    }
    for count in TOWERS:
        settings = f"model.towers={{count={count}, width={width}}}"
        variants[f"DLRM, {count} towers, CR 2"] = ("DLRM", ["model.name=tower_dlrm", settings])
        variants[f"DCN, {count} towers"] = (
            "DCN",
            ["model.name=tower_dcn", f"model.towers={{count={count}, width={DIM}}}"],
        )
    for compression in (4, 8, 16):
        settings = f"model.towers={{count=8, width={DIM // compression}}}"
        variants[f"DLRM, 8 towers, CR {compression}"] = (
            "DLRM",
            ["model.name=tower_dlrm", settings],
        )
    rows: list[Row] = []
    for label, (family, overrides) in variants.items():
        options.say(label)
        config = _config(dataset.path, [f"model.dim={DIM}", *overrides])
        aucs = _aucs(config, dataset, options, label)
        parent = next((row for row in rows if row["model"] == family), None)
        rows.append(
            {
                "data": name,
                "family": family,
                "model": label,
                **_spread(aucs),
                **_size(config, dataset),
                "of_parent": None if parent is None else float(np.median(aucs)) - parent["auc"],
                "of_parent_deviations": None
                if parent is None
                else float(np.median(aucs) - parent["auc"]) / max(parent["std"], 1e-9),
            }
        )
    return rows, _notes(
        options,
        "`of_parent`: median AUC less that of the family's model without towers, also in its"
        " deviations",
    )


def groups(options: Options) -> tuple[list[Row], list[str]]:
    """AUC with groups that were learned, dealt out in turn, and planted.

    The data have groups that are known.
    """
    from scipy.stats import mannwhitneyu

    planted = SyntheticOptions(PLANTED_SAMPLES, max_table_rows=30, groups=4)
    folder = options.scratch / "planted"
    synthesize(planted, folder)
    dataset = EncodedDataset.open(folder)
    partitions: dict[str, Sequence[Sequence[str]]] = {
        f"learned by {name}, {strategy}": _learned(name, strategy, dataset, options)
        for name, strategy in LEARNED
    }
    names = tuple(dataset.num_rows)
    partitions |= {
        "strided": [names[first::4] for first in range(4)],
        "planted": planted_groups(planted),
    }
    aucs = {}
    rows = []
    for label, towers in partitions.items():
        options.say(label)
        settings = f"model.towers={{width=2, groups={json.dumps(towers)}}}"
        config = _config(folder, ["model.name=tower_dcn", *PLANTED_SETTINGS, settings])
        aucs[label] = _aucs(config, dataset, options, label)
    for label, values in aucs.items():
        better = (
            float(mannwhitneyu(values, aucs["strided"], alternative="greater").pvalue)
            if label != "strided"
            else None
        )
        rows.append(
            {
                "data": "4 planted groups",
                "family": "DCN, 4 towers of width 2",
                "groups": label,
                **_spread(values),
                "p_better_than_strided": better,
                "rand_index": _agreement(partitions[label], planted_groups(planted)),
            }
        )
    return rows, _notes(
        options,
        "`rand_index`: pairs of features that are together, or apart, as in the planted groups",
    )


def _learned(
    name: str, strategy: Strategy, dataset: EncodedDataset, options: Options
) -> Sequence[Sequence[str]]:
    """Groups by the embeddings of a model without towers."""
    folder = options.scratch / f"parent {name}"
    if not folder.exists():
        options.say(f"{name}, whose embeddings say which features are alike")
        _train(_config(dataset.path, [f"model.name={name}", *PLANTED_SETTINGS]), dataset, folder)
    predictor, _ = open_for(folder, dataset)
    return group_features(
        predictor, dataset, 4, 20_000, strategy, Balance(1.5), weigh_bytes=False, centred=True
    ).groups


def _dataset(options: Options) -> tuple[EncodedDataset, str]:
    """Criteo's sample where it is at hand, else generated data."""
    path = sample_path()
    folder = options.scratch / "data"
    if path is None:
        synthesize(
            SyntheticOptions(100_000 if options.quick else SAMPLES, max_table_rows=10_000), folder
        )
        return EncodedDataset.open(folder), "generated"
    command = [
        str(our_python()),
        "-m",
        "pibroch",
        "data",
        "prepare",
        "criteo",
        str(path),
        "--out",
        str(folder),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return EncodedDataset.open(folder), "Criteo sample"


def _config(data: Path, overrides: Overrides) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"dir": str(data)},
        "model": {"name": "dlrm", "bottom": [64, 32], "top": [128, 64]},
        "embedding": {"optimizer": {"name": "adagrad", "lr": 0.1}},
        "optimizer": {"name": "adam", "lr": 2e-3},
        "train": {
            "epochs": 1,
            "batch_size": 512,
            "log_every": 1000,
            "evaluate_every": 400,
            "checkpoint_every": 1000,
        },
    }
    return change_config(check_config(base, "the benchmark"), overrides)


def _aucs(config: RunConfig, dataset: EncodedDataset, options: Options, label: str) -> list[float]:
    """Of each seed, on the test split."""
    results = []
    for seed in range(2 if options.quick else SEEDS):
        folder = options.scratch / "".join(c if c.isalnum() else "-" for c in f"{label} {seed}")
        results.append(_train(config.model_copy(update={"seed": seed}), dataset, folder))
    return results


def _train(config: RunConfig, dataset: EncodedDataset, folder: Path) -> float:
    run = RunDirectory(folder)
    run.create(config)
    auc = run_training(config, dataset, run, lambda _: FanOut([])).summary.auc
    assert auc is not None, "both classes are there"
    return auc


def _spread(values: Sequence[float]) -> Row:
    low, middle, high = (float(np.percentile(values, percent)) for percent in (0, 50, 100))
    return {
        "auc": middle,
        "std": float(np.std(values)),
        "auc_least": low,
        "auc_most": high,
        "runs": len(values),
    }


def _size(config: RunConfig, dataset: EncodedDataset) -> Row:
    """MFLOPs a sample of a step, and parameters of the dense layers in thousands."""
    names = tuple(dataset.num_rows)
    model = build_model(config.model, len(dataset.schema.dense), len(names), names)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"mflops": training_flops(model) / 1e6, "dense_thousands": count / 1e3}


def _agreement(actual: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> float:
    """Rand index of two partitions."""
    one, other = (
        {name: n for n, group in enumerate(groups) for name in group} for groups in (actual, right)
    )
    names = sorted(one)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    return sum((one[a] == one[b]) == (other[a] == other[b]) for a, b in pairs) / len(pairs)


def _notes(options: Options, meaning: str) -> list[str]:
    runs = 2 if options.quick else SEEDS
    return [
        (
            f"`auc`: median of {runs} seeds on the test split, `std` their deviation; no figure"
            " depends on load"
        ),
        meaning,
    ]
