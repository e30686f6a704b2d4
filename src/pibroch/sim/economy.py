"""What is left of the time where processes die, and what samples cost."""

from __future__ import annotations

from dataclasses import dataclass

from pibroch.config.train import TrainConfig
from pibroch.errors import ConfigError
from pibroch.train.memory_cuts import LONGEST_S

HOUR_S = 3600.0
BILLION = 1e9


@dataclass(frozen=True, slots=True)
class Economy:
    """What is asked besides steps.

    Attributes:
        death_every_h: mean hours between two deaths of one rank, which come at random; ``None``
            for no deaths.
        recovery_s: from a death to the next new step, without the steps that are made again.
        host_price: of a host and hour, in any currency; ``None`` where it is not asked.
    """

    death_every_h: float | None = None
    recovery_s: float = 5.0
    host_price: float | None = None

    def goodput(self, num_ranks: int, interval_s: float) -> float:
        """Share of the time in which new steps are made.

        Each death costs the recovery and, on average, half an interval of steps.

        Args:
            num_ranks: each of which may die.
            interval_s: between two states from which a run goes on.

        Example:
            >>> round(Economy(death_every_h=1.0, recovery_s=5.0).goodput(8, 30.0), 4)
            0.9574
        """
        if self.death_every_h is None:
            return 1.0
        deaths_a_second = num_ranks / (self.death_every_h * HOUR_S)
        return 1 / (1 + deaths_a_second * (self.recovery_s + interval_s / 2))

    def price_of_a_billion(self, num_hosts: int, samples_per_second: float) -> float | None:
        """Of a billion new samples.

        >>> Economy(host_price=3.6).price_of_a_billion(2, 1e6)
        2.0
        """
        if self.host_price is None:
            return None
        return self.host_price * num_hosts * BILLION / samples_per_second / HOUR_S


def interval_of(config: TrainConfig) -> float:
    """Seconds between two states from which a run goes on after a death.

    Where a run chooses the interval of its cuts in memory, the longest that it does.

    Raises:
        ConfigError: for a run that keeps none by time.
    """
    if config.cut_every_seconds is None:
        return LONGEST_S
    interval = config.cut_every_seconds or config.checkpoint_every_seconds
    if not interval:
        raise ConfigError(
            "a recipe without cuts in memory and checkpoints by time",
            "one of them, from which a run goes on after a death",
            "set train.cut_every_seconds, or leave --death-every out",
        )
    return interval
