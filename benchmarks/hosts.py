"""What the topics on several hosts share.

The case of a workload, turns at one rate, and how their times and bytes are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

from benchmarks.cases import Case
from benchmarks.lab import Lab
from benchmarks.registry import Options
from benchmarks.results import Row
from benchmarks.runner import Schedule, Times, measure
from benchmarks.team import Carried, Team
from benchmarks.workloads import Workload

TORCHREC_FORMS = {
    "TorchRec pipelined": "distributed_torchrec:build_pipelined",
    "TorchRec DMP": "distributed_torchrec",
}
IDEAL = "ideal"
BATCH_SIZE = 2048  # of a rank


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one line-up gave at one rate.

    Times and bytes by contender, those between processes of a host apart.
    """

    rate: str
    times: dict[str, Times]
    link_mb: dict[str, tuple[float, float]]
    loopback_mb: dict[str, float] = field(default_factory=dict)

    @property
    def torchrec(self) -> str | None:
        """The faster form of TorchRec."""
        forms = [label for label in self.times if label in TORCHREC_FORMS]
        return min(forms, key=lambda label: self.times[label].percentile(50), default=None)


def case_of(workload: Workload, hosts: int, dim: int, options: Options) -> Case:
    """The case that all contenders build.

    ``data`` holds global batches, of which each rank takes its part.
    """
    path = workload.write(options.scratch)
    batch_size = workload.batch_size // hosts
    return Case(
        str(path), dim, batch_size=batch_size, sparse_optimizer="rowwise_adagrad", threads=1
    )


def measure_at(rate: str, lab: Lab, running: list[Team], schedule: Schedule) -> Outcome:
    """Time all contenders in turn with links of one rate."""
    lab.network.shape(rate)
    for team in running:
        team.carried.clear()
    times = measure(running, "step", schedule)
    links = {team.spec.label: link_mb(team.carried) for team in running}
    return Outcome(
        rate, times, links, {team.spec.label: loopback_mb(team.carried) for team in running}
    )


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What the same line-up gave in several sets of processes, as if in one."""
    first = outcomes[0]
    times = {label: Times() for label in first.times}
    for label, own in times.items():
        for each in outcomes:
            own.extend(each.times[label])

    links = {}
    loopback = {}
    for label in times:
        sent, most = np.mean([each.link_mb[label] for each in outcomes], axis=0).tolist()
        links[label] = (sent, most)
        loopback[label] = mean(each.loopback_mb[label] for each in outcomes)
    return Outcome(first.rate, times, links, loopback)


def link_mb(carried: Sequence[Carried]) -> tuple[float, float]:
    """Megabytes a step: sent on the mean link, and either way on the link that carried most."""
    steps = sum(turn.steps for turn in carried)
    bytes_per_link = np.array(
        [[(link.sent, link.received) for link in turn.links] for turn in carried]
    ).sum(0)
    return float(bytes_per_link[:, 0].mean() / steps / 1e6), float(
        bytes_per_link.max() / steps / 1e6
    )


def loopback_mb(carried: Sequence[Carried]) -> float:
    """Megabytes a host and step between processes of one host, by sockets.

    What goes through shared memory is not in it.
    """
    steps = sum(turn.steps for turn in carried)
    return float(np.mean([turn.loopback for turn in carried], axis=1).sum() / steps / 1e6)


def figures(outcome: Outcome, label: str, hosts: int, batch_size: int = BATCH_SIZE) -> Row:
    """One contender's times, its ratios to TorchRec and to the ideal, and its bytes."""
    own = outcome.times[label]
    (sent_mb, worst_link_mb) = outcome.link_mb[label]
    p50_ms = own.percentile(50)
    to_torchrec = ratios(outcome, label, outcome.torchrec)
    return {
        "p20_ms": own.percentile(20),
        "p50_ms": p50_ms,
        "p80_ms": own.percentile(80),
        "cpu_ms_per_step": sum(own.cpu_ms) / len(own.cpu_ms),
        "samples_per_second": hosts * batch_size / p50_ms * 1e3,
        "of_torchrec": middle(to_torchrec),
        "of_torchrec_least": min(to_torchrec, default=None),
        "of_torchrec_most": max(to_torchrec, default=None),
        "of_ideal": middle(ratios(outcome, label, IDEAL)),
        "sent_mb_per_step": sent_mb,
        "worst_link_mb_per_step": worst_link_mb,
    }


def comparison(outcome: Outcome, label: str) -> str:
    """A contender's step time over that of TorchRec's faster form and over the ideal's.

    Each where it was measured.
    """
    parts = []
    for other, name in (
        (outcome.torchrec, f"TorchRec's step time ({outcome.torchrec})"),
        (IDEAL, "the ideal's"),
    ):
        result = ratios(outcome, label, other)
        if result:
            parts.append(f"{middle(result):.2f}x ({min(result):.2f} to {max(result):.2f}) {name}")
    return " and ".join(parts)


def ratios(outcome: Outcome, label: str, other: str | None) -> list[float]:
    """Step time over that of another contender, round by round; empty when it did not run."""
    if other not in outcome.times:
        return []
    return outcome.times[label].ratios_to(outcome.times[other])


def middle(values: list[float]) -> float | None:
    """The median, ``None`` of nothing."""
    return median(values) if values else None
