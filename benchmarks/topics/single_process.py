"""Training DLRM in one process.

Pibroch, plain torch, TorchRec on FBGEMM, and what no embeddings at all would take.

The same model, starting weights, batches, optimizers and number of threads for all. The peer is
shown in three forms: as its users train (planner and ``DistributedModelParallel``), as its
unsharded fused collection, and as FBGEMM's operator with plain torch around it. The fastest of the
three counts as TorchRec.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup, Outcome, arena, noise_note
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import QUICK, Schedule, Times
from benchmarks.workloads import Workload, sample_path

TORCH = "plain torch"
IDEAL = "dense model alone"
TORCHREC_FORMS = {
    "FBGEMM TBE": "dlrm_fbgemm",
    "TorchRec fused EBC": "dlrm_torchrec_fused",
    "TorchRec DMP": "dlrm_torchrec",
}
BATCH_SIZE = 2048
NUM_BATCHES = 32
SPARSE_LR = {"sgd": 1.0, "adagrad": 0.05, "rowwise_adagrad": 0.05}
COLUMNS = [
    "ids", "optimizer", "dim", "contender", "p20_ms", "p50_ms", "p80_ms", "samples_per_second",
    "over_torch", "over_pibroch", "peak_mb", "over_baseline_mb", "parameters_and_state_mb",
]  # fmt: skip
PLOT = PlotSpec(
    "samples_per_second", ("ids", "optimizer"), "dim", "contender", "samples/s", "low", "high"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line-up's common ground."""

    ids: str
    optimizer: str
    dim: int

    def __str__(self) -> str:
        return f"{self.ids} ids, {self.optimizer}, dim {self.dim}"


def settings(quick: bool) -> list[Setting]:
    """What to measure; the real ids only where the sample is at hand."""
    pairs = [("zipf", "adagrad")]
    if not quick:
        pairs += [("zipf", "rowwise_adagrad"), ("zipf", "sgd")]
        pairs += [("criteo", "adagrad")] if sample_path() else []
    return [Setting(ids, optimizer, dim) for ids, optimizer in pairs for dim in (16, 64)]


@topic(
    "single_process",
    "DLRM training, samples/s and memory, against plain torch and TorchRec in one process",
)
def run(options: Options) -> Report:
    """Measure all settings."""
    forms = dict(list(TORCHREC_FORMS.items())[:1]) if options.quick else TORCHREC_FORMS
    lineup = Lineup.of(
        {OURS: "dlrm_pibroch", TORCH: "dlrm_torch", IDEAL: "dlrm_ideal_pibroch"}, forms
    )
    schedule = QUICK if options.quick else Schedule()
    load = ForeignLoad()
    notes = list(lineup.notes)
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for setting in settings(options.quick):
        options.say(str(setting))
        case = case_of(setting, options)
        without = frozenset({TORCH} if setting.optimizer == "rowwise_adagrad" else ())
        specs = tuple(spec for spec in lineup.specs if spec.label not in without)
        with arena(
            specs, load
        ) as contenders:  # a fresh process per setting, so that peak memory is its own
            outcome = contenders.compare(
                case, ("step",), schedule, without, unlike=frozenset({IDEAL})
            )
            versions |= contenders.versions
        rows += case_rows(setting, case, outcome)
        notes += [headline(setting, outcome), f"{setting}: {outcome.agreement}"]
    notes += [noise_note(load), *MEANINGS]
    origin = provenance() | {"threads": str(torch.get_num_threads())} | versions
    return Report(
        "single_process", "DLRM training in one process", rows, COLUMNS, PLOT, notes, origin
    )


MEANINGS = (
    (
        "DLRM 13-512-256-D / 512-256-1 with dot interaction, 26 tables of 100,000 rows, batch 2048,"
        " dense layers with SGD"
    ),
    "a step: forward, backward, dense and sparse update of a batch that lies in memory",
    (
        "`over_torch`, `over_pibroch`: the contender's time over plain torch's, of the medians of"
        " all steps, and over pibroch's, median over the rounds"
    ),
    (
        "`peak_mb`: most resident memory of the whole process; `over_baseline_mb`: of it, what came"
        " after imports"
    ),
    (
        f"{IDEAL}: pibroch's, with embeddings that are there already and never updated; no exchange"
        " could train faster with it"
    ),
    "`parameters_and_state_mb`: embedding weights and optimizer state, the least there can be",
)


def case_of(setting: Setting, options: Options) -> Case:
    """The case that all contenders build."""
    workload = Workload(setting.ids, NUM_BATCHES, BATCH_SIZE)
    return Case(
        str(workload.write(options.scratch)),
        setting.dim,
        batch_size=BATCH_SIZE,
        sparse_optimizer=setting.optimizer,
        sparse_lr=SPARSE_LR[setting.optimizer],
        threads=torch.get_num_threads(),
    )


def case_rows(setting: Setting, case: Case, outcome: Outcome) -> list[Row]:
    """One row a contender."""
    times = outcome.times["step"]
    rows = []
    for label, own in times.items():
        memory = outcome.memory[label]
        median = own.percentile(50)
        ratios = sorted(own.ratios_to(times[OURS]))
        rows.append(
            {
                "ids": setting.ids,
                "optimizer": setting.optimizer,
                "dim": setting.dim,
                "contender": label,
                "p20_ms": own.percentile(20),
                "p50_ms": median,
                "p80_ms": own.percentile(80),
                "cpu_ms_per_step": sum(own.cpu_ms) / len(own.cpu_ms),
                "samples_per_second": case.batch_size / median * 1e3,
                "low": case.batch_size / own.percentile(80) * 1e3,
                "high": case.batch_size / own.percentile(20) * 1e3,
                "over_torch": median / times[TORCH].percentile(50) if TORCH in times else None,
                "over_pibroch": ratios[len(ratios) // 2],
                "over_pibroch_least": ratios[0],
                "over_pibroch_most": ratios[-1],
                "peak_mb": memory["peak"] / 1e6,
                "over_baseline_mb": (memory["peak"] - memory["baseline"]) / 1e6,
                "parameters_and_state_mb": (case.parameter_bytes + case.state_bytes) / 1e6,
            }
        )
    return rows


def headline(setting: Setting, outcome: Outcome) -> str:
    """One line: pibroch against plain torch and the fastest form of TorchRec.

    And how far its dense model alone would come.
    """
    times = outcome.times["step"]
    peers = {TORCH: TORCH} if TORCH in times else {}
    forms = [label for label in times if label in TORCHREC_FORMS]
    if forms:
        fastest = min(forms, key=lambda label: times[label].percentile(50))
        peers[fastest] = f"TorchRec ({fastest})"
    if not peers:
        return f"{setting}: no peer"
    reached = " and ".join(f"{_ratio(times, label, OURS)} {name}" for label, name in peers.items())
    possible = " and ".join(_ratio(times, label, IDEAL) for label in peers)
    return f"**{setting}: pibroch trains {reached}; its {IDEAL} {possible}**"


def _ratio(times: dict[str, Times], label: str, to: str) -> str:
    ratios = sorted(times[label].ratios_to(times[to]))
    return f"{ratios[len(ratios) // 2]:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
