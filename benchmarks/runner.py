"""Interleaved measurement: A, B, C, A, B, C, ...

A slow minute of the machine meets every contender alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.contender import Competitor, Timing
from pibroch.errors import ConfigError

MIN_STEPS_PER_ROUND = 10


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often to measure.

    Attributes:
        rounds: turns of each contender.
        steps_per_round: timed steps in a turn, at least ten.
        warmup_steps: untimed steps before the first round; one more opens each turn, so that caches
            are its own.
        pause_s: seconds after each turn, in which it ends what it does beside its steps.
    """

    rounds: int = 5
    steps_per_round: int = 12
    warmup_steps: int = 5
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.steps_per_round < MIN_STEPS_PER_ROUND:
            raise ConfigError(
                f"{self.rounds} rounds of {self.steps_per_round} steps",
                f"at least 1 round of {MIN_STEPS_PER_ROUND} steps",
                "raise them: fewer steps say nothing about p20 and p80",
            )


QUICK = Schedule(rounds=3, steps_per_round=10, warmup_steps=3)


@dataclass(slots=True)
class Times:
    """One contender's times: milliseconds ``[rounds][steps]``.

    Also CPU milliseconds a step by round, and further times of each step by name.
    """

    rounds_ms: list[list[float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, timing: Timing) -> None:
        """Add a round."""
        before = sum(len(steps) for steps in self.rounds_ms)
        for name in [*self.figures, *(name for name in timing.figures if name not in self.figures)]:
            earlier = self.figures.setdefault(name, [0.0] * before)
            earlier += timing.figures.get(name, [0.0] * len(timing.step_ms))
        self.rounds_ms.append(timing.step_ms)
        self.cpu_ms.append(timing.cpu_ms_per_step)

    def extend(self, other: Times) -> None:
        """Add the rounds of another set of processes, which report the same figures."""
        self.rounds_ms += other.rounds_ms
        self.cpu_ms += other.cpu_ms
        for name, values in other.figures.items():
            self.figures.setdefault(name, []).extend(values)

    def percentile(self, percent: float) -> float:
        """Over all steps of all rounds, in milliseconds."""
        return float(np.percentile(np.concatenate(self.rounds_ms), percent))

    def ratios_to(self, other: Times) -> list[float]:
        """How many times as long as ``other`` a median step took, round by round."""
        pairs = zip(self.rounds_ms, other.rounds_ms, strict=True)
        return [float(np.median(own) / np.median(baseline)) for own, baseline in pairs]


def measure(contenders: Sequence[Competitor], phase: str, schedule: Schedule) -> dict[str, Times]:
    """Time ``phase`` of every contender in turn.

    Keys are the contenders' labels in the order given.
    """
    for contender in contenders:
        contender.run(phase, 0, schedule.warmup_steps)
        if schedule.pause_s:
            contender.pause(schedule.pause_s)
    times = {contender.spec.label: Times() for contender in contenders}
    for turn in range(schedule.rounds):
        first = schedule.warmup_steps + turn * schedule.steps_per_round
        for contender in contenders:
            contender.run(phase, first - 1, 1)
            timing = contender.run(phase, first, schedule.steps_per_round)
            if schedule.pause_s:
                contender.pause(schedule.pause_s)
            times[contender.spec.label].add(timing)
    return times
