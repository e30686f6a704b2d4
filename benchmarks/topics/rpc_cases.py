"""Whole programs over remote calls: the case studies of the paper (Sec. 4.3 to 4.6).

The same lines run with pibroch and with torch.
"""

from __future__ import annotations

from statistics import median

from benchmarks.agreement import check_agreement
from benchmarks.cases import Case
from benchmarks.comparison import OURS, noise_note
from benchmarks.contender import ContenderSpec
from benchmarks.environments import our_python
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.rpc_pairs import pairs
from benchmarks.runner import Schedule, Times, measure
from benchmarks.workers import rpc_case_sizes, rpc_library

TORCH = "torch"
LIBRARIES = {OURS: rpc_library.PIBROCH, TORCH: rpc_library.TORCH}
PHASES = {
    "rl": "reinforcement learning, batched inference",
    "pipeline": "transformer over stages",
    "parameter_server": "DLRM with a parameter server",
    "federated": "federated averaging",
}
NO_BATCHES = Case(data="", dim=0, threads=0)  # each case makes its own
QUICK = Schedule(rounds=1, steps_per_round=10, warmup_steps=1)
FULL = Schedule(rounds=5, steps_per_round=10, warmup_steps=2)
COLUMNS = ["program", "contender", "p20_ms", "p50_ms", "p80_ms", "over_pibroch", "cpu_ms"]
PLOT = PlotSpec(
    "over_pibroch",
    ("program",),
    "case",
    "contender",
    "times as long as pibroch",
    "over_least",
    "over_most",
    1,
)
MEANINGS = (
    (
        "one thread a process; the processes of a contender are stopped while it is another's turn;"
        " libraries at their defaults"
    ),
    (
        "`rl`: an episode of all observers, whose frames the agent answers by one pass of its"
        " policy, and a step of REINFORCE"
    ),
    (
        "`pipeline`: a batch in micro-batches through the stages and back by distributed autograd,"
        " and a step of SGD"
    ),
    (
        "`parameter_server`: a global batch: rows from the first worker, dense gradients by torch's"
        " DDP, sparse ones sent back"
    ),
    "`federated`: a round: the model to all clients, their steps, the models back, the mean",
    (
        "`over_pibroch`: the contender's time over pibroch's, median over the rounds; `cpu_ms`: CPU"
        " time of all processes a step"
    ),
)


@topic("rpc_cases", "whole programs over remote calls, the same lines with torch.distributed.rpc")
def run(options: Options) -> Report:
    """Measure all four programs."""
    sizes = rpc_case_sizes.sizes(options.quick)
    load = ForeignLoad()
    with pairs(specs(sizes), None, load, sizes.workers + 1) as running:
        versions: dict[str, str] = {}
        for group in running:
            options.say(f"{group.spec.label} joins")
            versions |= group.setup(NO_BATCHES)
        options.say("checking that losses agree")
        agreement = check_agreement(running)
        rows: list[Row] = []
        for phase, program in PHASES.items():
            options.say(program)
            times = measure(running, phase, QUICK if options.quick else FULL)
            rows += rows_of(phase, times)
    notes = [
        str(agreement),
        f"sizes: `{rpc_case_sizes.as_text(sizes)}`",
        noise_note(load),
        *MEANINGS,
    ]
    return Report(
        "rpc_cases",
        "Programs over remote calls",
        rows,
        COLUMNS,
        PLOT,
        notes,
        provenance() | versions,
    )


def specs(sizes: rpc_case_sizes.Sizes) -> tuple[ContenderSpec, ...]:
    """Pibroch and torch, whose processes are told the sizes."""
    common = {rpc_case_sizes.VARIABLE: rpc_case_sizes.as_text(sizes), "GLOO_SOCKET_IFNAME": "lo"}
    return tuple(
        ContenderSpec(
            label,
            f"rpc_cases_{label}:build",
            our_python(),
            environment={rpc_library.VARIABLE: library, **common},
        )
        for label, library in LIBRARIES.items()
    )


def rows_of(phase: str, times: dict[str, Times]) -> list[Row]:
    """One row a contender."""
    rows: list[Row] = []
    for label, own in times.items():
        ratios = own.ratios_to(times[OURS])
        rows.append(
            {
                "program": phase,
                "case": "step",
                "contender": label,
                **{f"p{percent}_ms": own.percentile(percent) for percent in (20, 50, 80)},
                "over_pibroch": median(ratios),
                "over_least": min(ratios),
                "over_most": max(ratios),
                "cpu_ms": sum(own.cpu_ms) / len(own.cpu_ms),
            }
        )
    return rows
