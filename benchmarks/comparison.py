"""One case, several contenders: set up, check that they agree, then measure in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.agreement import Agreement, check_agreement
from benchmarks.cases import Case
from benchmarks.contender import Contender, ContenderSpec
from benchmarks.environments import our_python, peers_python
from benchmarks.load import NOISY_SHARE, ForeignLoad
from benchmarks.runner import Schedule, Times, measure
from pibroch.errors import MissingDependencyError

OURS = "pibroch"


@dataclass(frozen=True, slots=True)
class Lineup:
    """Who takes part, ours first, and a note for each who cannot."""

    specs: tuple[ContenderSpec, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, here: dict[str, str], peers: dict[str, str]) -> Lineup:
        """Contenders ``label -> worker`` of this environment and of the peers'.

        A missing one leaves a note, not silence.
        """
        specs = [ContenderSpec(label, worker, our_python()) for label, worker in here.items()]
        try:
            specs += [
                ContenderSpec(label, worker, peers_python()) for label, worker in peers.items()
            ]
        except MissingDependencyError as missing:
            return cls(tuple(specs), (f"**{', '.join(peers)} left out**: {missing}",))
        return cls(tuple(specs))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case gave: times by phase and contender, memory by contender, the check."""

    times: dict[str, dict[str, Times]]
    memory: dict[str, dict[str, int]]
    agreement: Agreement


class Arena:
    """Running contenders; collects their versions."""

    def __init__(self, contenders: list[Contender]) -> None:
        self._contenders = contenders
        self.versions: dict[str, str] = {}

    def compare(
        self,
        case: Case,
        phases: tuple[str, ...],
        schedule: Schedule,
        without: frozenset[str],
        unlike: frozenset[str] = frozenset(),
    ) -> Outcome:
        """Measure a case with all contenders but those in ``without``.

        Those in ``unlike`` need not agree with the others.

        Raises:
            BenchmarkError: when a contender fails or two disagree; nothing is measured then.
        """
        active = [
            contender for contender in self._contenders if contender.spec.label not in without
        ]
        for contender in active:
            self.versions |= contender.setup(case)
        agreement = check_agreement(
            [contender for contender in active if contender.spec.label not in unlike]
        )
        times = {phase: measure(active, phase, schedule) for phase in phases}
        return Outcome(
            times, {contender.spec.label: contender.memory() for contender in active}, agreement
        )


@contextmanager
def arena(specs: tuple[ContenderSpec, ...], load: ForeignLoad) -> Iterator[Arena]:
    """Start the contenders, end them afterwards."""
    with ExitStack() as stack:
        contenders = [stack.enter_context(Contender(spec)) for spec in specs]
        for contender in contenders:
            load.add_worker(contender.pid)
        yield Arena(contenders)


def noise_note(load: ForeignLoad) -> str:
    """How much others used the machine; says so plainly when that spoils the times."""
    share = load.share()
    text = f"other processes used {share:.0%} of the {os.cpu_count()} CPUs during the measurement"
    return f"**noisy, provisional**: {text}" if share > NOISY_SHARE else text
