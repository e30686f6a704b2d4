"""What is left of the time where processes die, and what samples cost."""

from __future__ import annotations

from dataclasses import dataclass

from pibroch.config.train import TrainConfig
from pibroch.errors import ConfigError
from pibroch.train.memory_cuts import LONGEST_S, SHARE, SHORTEST_S

HOUR_S = 3600.0
BILLION = 1e9


@dataclass(frozen=True, slots=True)
class Saved:
    """How a run keeps what it goes on from after a death.

    Attributes:
        interval_s: between two states.
        share: of the training thread's time that it takes.
    """

    interval_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Economy:
    """What is asked besides steps.

    Attributes:
        death_every_h: mean hours between two deaths of one rank, which come at random; ``None``
            for no deaths.
        recovery_s: from a death to the next new step, without the steps that are made again.
        host_price: of a host and hour, in any currency; ``None`` where it is not asked.
        saving_s: of the training thread, for one cut in memory or checkpoint by time; where absent
            what runs let it take that choose the interval themselves.
    """

    death_every_h: float | None = None
    recovery_s: float = 5.0
    host_price: float | None = None
    saving_s: float | None = None

    def goodput(self, num_ranks: int, saved: Saved) -> float:
        """Share of the time in which new steps are made.

        Each death costs the recovery and, on average, half an interval of steps.

        Args:
            num_ranks: each of which may die.
            saved: how the run keeps what it goes on from.

        Example:
            >>> economy = Economy(death_every_h=1.0, recovery_s=5.0)
            >>> round(economy.goodput(8, Saved(interval_s=30.0, share=0.01)), 4)
            0.9479
        """
        if self.death_every_h is None:
            return 1.0
        deaths_a_second = num_ranks / (self.death_every_h * HOUR_S)
        lost_s = self.recovery_s + saved.interval_s / 2
        return (1 - saved.share) / (1 + deaths_a_second * lost_s)

    def price_of_a_billion(self, num_hosts: int, samples_per_second: float) -> float | None:
        """Of a billion new samples.

        >>> Economy(host_price=3.6).price_of_a_billion(2, 1e6)
        2.0
        """
        if self.host_price is None:
            return None
        return self.host_price * num_hosts * BILLION / samples_per_second / HOUR_S


def saved_by(config: TrainConfig, saving_s: float | None) -> Saved:
    """How a run of these settings keeps it.

    One that chooses the interval of its cuts in memory does so by what they take; where that is not
    known the interval is the longest that it chooses, and the share the largest.

    Args:
        config: its settings.
        saving_s: see :class:`Economy`.

    Raises:
        ConfigError: for a run that keeps none by time, or has no time left for steps.
    """
    if config.cut_every_seconds is None:
        if saving_s is None:
            return Saved(LONGEST_S, SHARE)
        interval = min(max(saving_s / SHARE, SHORTEST_S), LONGEST_S)
    else:
        interval = config.cut_every_seconds or config.checkpoint_every_seconds
    if not interval:
        raise ConfigError(
            "a recipe without cuts in memory and checkpoints by time",
            "one of them, from which a run goes on after a death",
            "set train.cut_every_seconds, or leave --death-every out",
        )
    if (saving_s or 0.0) >= interval:
        raise ConfigError(
            f"--saving {saving_s:g} every {interval:g} s",
            "less than the interval",
            "set train.cut_every_seconds or train.checkpoint_every_seconds to more",
        )
    return Saved(interval, (saving_s or 0.0) / interval)
