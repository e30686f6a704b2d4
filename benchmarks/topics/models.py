"""Whole trainings of models beside FuxiCTR: what they are worth, and how fast they go.

Both sides read the same encoded data, have the same hyper-parameters and stop by the same rule.
Both begin with the same weights, on which FinalNet's AUC with Adagrad depends by more than the bar
between both sides. Before anything is reported FuxiCTR's model is given the weights that pibroch
trained, and must give each sample of the test split the same score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.comparison import OURS, noise_note
from benchmarks.environments import fuxictr_python
from benchmarks.fuxictr_data import write_dataset, write_start, write_weights
from benchmarks.layers_alone import layers_alone
from benchmarks.load import ForeignLoad
from benchmarks.model_cases import ModelCase
from benchmarks.model_runs import (
    Trained,
    config_of,
    criteo_sample,
    generated_histories,
    train_fuxictr,
    train_pibroch,
)
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from pibroch.data import EncodedDataset
from pibroch.errors import MissingDependencyError

FUXICTR = "FuxiCTR"
LAYERS = "layers alone"
MODELS = {
    "dcnv2": "DCNv2",
    "deepfm": "DeepFM",
    "finalmlp": "FinalMLP",
    "finalnet": "FinalNet",
    "din": "DIN",
}
OPTIMIZERS = {"adam": 1e-3, "adagrad": 1e-2}
SEEDS = (1, 2, 3)
GENERATED_SAMPLES = 200_000
QUICK_SAMPLES = 20_000
AUC_BAR = 0.002
SPEED_BAR = 4.0
COLUMNS = [
    "data", "optimizer", "contender", "auc", "auc_by_seed", "auc_difference", "auc_bar", "epochs",
    "samples_per_second", "over_fuxictr", "speed_bar",
]  # fmt: skip
PLOT = PlotSpec(
    "samples_per_second", ("data",), "optimizer", "contender", "samples/s", "slowest", "fastest"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Runs of one case on both sides, by seed; of FuxiCTR none where it is not installed.

    Attributes:
        case: of the first seed.
        ours: runs of pibroch.
        theirs: runs of FuxiCTR.
        layers: samples a second of the layers alone, beside each run.
    """

    case: ModelCase
    ours: list[Trained]
    theirs: list[Trained]
    layers: list[float]


@topic(
    "models",
    "whole trainings beside FuxiCTR: AUC and samples a second of the same models",
    sections=list(MODELS),
    quick_sections=["dcnv2"],
)
def run(options: Options) -> Report:
    """Measure a model."""
    load = ForeignLoad()
    options.say("preparing the data")
    dataset = data_of(options)
    notes = []
    try:
        fuxictr_python()
    except MissingDependencyError as missing:
        notes.append(f"**{FUXICTR} left out**: {missing}")
    has_peer = not notes
    pairs = [measured(case, dataset, options, has_peer) for case in cases(options)]
    data = "generated" if options.section == "din" else "Criteo sample"
    rows = [{"data": data, **row} for pair in pairs for row in rows_of(pair)]
    if has_peer:
        notes += [headline(pair) for pair in pairs]
    notes += [*meanings(pairs, dataset), noise_note(load)]
    title = f"{MODELS[options.section]} in pibroch and in FuxiCTR"
    versions = pairs[0].theirs[0].versions if has_peer else {}
    return Report("models", title, rows, COLUMNS, PLOT, notes, provenance() | versions)


def cases(options: Options) -> list[ModelCase]:
    """One an optimizer, of the first seed."""
    whole = [ModelCase(options.section, name, lr, seed=SEEDS[0]) for name, lr in OPTIMIZERS.items()]
    return [replace(whole[0], epochs=2, batch_size=512)] if options.quick else whole


def data_of(options: Options) -> EncodedDataset:
    """The section's data, which it may share with one before it."""
    name = "generated" if options.section == "din" else "criteo"
    folder = options.scratch / name
    if folder.exists():
        return EncodedDataset.open(folder)
    if options.section == "din":
        dataset = generated_histories(folder, QUICK_SAMPLES if options.quick else GENERATED_SAMPLES)
    else:
        dataset = criteo_sample(folder, QUICK_SAMPLES if options.quick else None)
    write_dataset(dataset, peer_files(dataset))
    return dataset


def peer_files(dataset: EncodedDataset) -> Path:
    """The folder of the same data as FuxiCTR reads them."""
    return dataset.path.with_suffix(".fuxictr")


def measured(case: ModelCase, dataset: EncodedDataset, options: Options, has_peer: bool) -> Pair:
    """Train on both sides in turn; the first seed's models are compared score by score."""
    pair = Pair(case, [], [], [])
    weights: Path | None = options.scratch / f"{case.model}-{case.optimizer}.npz"
    for seed in SEEDS[:1] if options.quick else SEEDS:
        options.say(f"{case.model}, {case.optimizer}, seed {seed}")
        one = replace(case, seed=seed)
        run_folder = options.scratch / f"{case.model}-{case.optimizer}-{seed}"
        pair.ours.append(train_pibroch(one, dataset, run_folder))
        pair.layers.append(layers_alone(dataset, run_folder, case.batch_size))
        if not has_peer:
            continue
        start = run_folder.with_suffix(".start.npz")
        write_start(config_of(one, dataset), dataset, start)
        if weights is not None:
            write_weights(run_folder, dataset, weights)
        pair.theirs.append(train_fuxictr(one, peer_files(dataset), start, weights))
        weights = None
    return pair


def rows_of(pair: Pair) -> list[Row]:
    """A row for each side, of which ours says what both bars ask, and one for layers alone."""
    ours: Row = side(pair, OURS, pair.ours)
    layers: Row = {
        "optimizer": pair.case.optimizer,
        "contender": LAYERS,
        "samples_per_second": median(pair.layers),
        "slowest": min(pair.layers),
        "fastest": max(pair.layers),
    }
    if not pair.theirs:
        return [ours, layers]
    theirs: Row = side(pair, FUXICTR, pair.theirs)
    difference = ours["auc"] - theirs["auc"]
    speedup = _times_as_fast([each.samples_per_second for each in pair.ours], pair.theirs)
    layers["over_fuxictr"] = _times_as_fast(pair.layers, pair.theirs)
    ours |= {
        "auc_difference": difference,
        "auc_bar": "holds" if abs(difference) <= AUC_BAR else "missed",
        "over_fuxictr": speedup,
        "speed_bar": "holds" if speedup >= SPEED_BAR else "missed",
    }
    return [ours, theirs, layers]


def _times_as_fast(rates: list[float], theirs: list[Trained]) -> float:
    both = zip(rates, theirs, strict=True)
    return median(rate / other.samples_per_second for rate, other in both)


def side(pair: Pair, contender: str, trained: list[Trained]) -> Row:
    """Medians over seeds, and between which figures they are."""
    aucs = [each.auc for each in trained]
    rates = [each.samples_per_second for each in trained]
    return {
        "optimizer": pair.case.optimizer,
        "contender": contender,
        "auc": median(aucs),
        "auc_by_seed": ", ".join(f"{auc:.4f}" for auc in aucs),
        "epochs": median(each.epochs for each in trained),
        "samples_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
    }


def headline(pair: Pair) -> str:
    """What both bars say of a pair."""
    ours, _, layers = rows_of(pair)
    gap = pair.theirs[0].score_gap
    return (
        f"**{pair.case.optimizer}: AUC {ours['auc_difference']:+.4f} beside {FUXICTR} (bar: within"
        f" {AUC_BAR:g}: {ours['auc_bar']}), {ours['over_fuxictr']:.1f} times as many samples a"
        f" second (bar: {SPEED_BAR:g}: {ours['speed_bar']}; layers alone"
        f" {layers['over_fuxictr']:.1f})**; with the same weights no score differs by more than"
        f" {gap:.1e}"
    )


def meanings(pairs: list[Pair], dataset: EncodedDataset) -> list[str]:
    """What was trained, and what columns mean."""
    case = pairs[0].case
    fields = len(dataset.schema.categorical)
    best = (dataset.best_possible_auc or {}).get("test")
    rates = ", ".join(f"{pair.case.optimizer} {pair.case.lr:g}" for pair in pairs)
    widths = "-".join(map(str, case.top))
    return [
        (
            f"{dataset.samples['train']:,} samples train, {dataset.samples['test']:,} test,"
            f" {fields} categorical columns, {sum(dataset.known_num_rows.values()):,} rows of width"
            f" {case.dim}" + ("" if best is None else f"; best possible AUC {best:.4f}")
        ),
        (
            f"both sides: hidden layers {widths}, batch {case.batch_size:,}, {rates} for layers and"
            f" embeddings; the same weights at the start, embeddings normal with deviation"
            f" {case.initial_std:g}; no"
            f" regularisation; at most {case.epochs} epochs, after one without a better AUC on the"
            f" validation split a tenth of the learning rate, after {case.patience} in a row the"
            " end; the best epoch's model is tested"
        ),
        (
            "Adagrad is the same mathematics on both sides. Adam is not: FuxiCTR's moves every row"
            " in every step by its decaying moments, pibroch's those of the batch alone"
        ),
        (
            "`auc`, `epochs`, `samples_per_second`: medians over seeds. A run's samples a second"
            " are those of its quickest epoch, reading included, evaluation not; `over_fuxictr`:"
            " median over pairs of runs, which took turns"
        ),
        (
            f"`{LAYERS}`: forward and backward over embeddings that lie in memory, the quickest of"
            " some steps: what no program that computes these layers by torch can surpass, whatever"
            " its lookups, updates and reading cost"
        ),
    ]
