"""Which samples train, validate and test.

By order, by a hash of their number, by the file that they came in, or all alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError

SPLITS = ("train", "validation", "test")
TRAIN = 0
_SPEC = re.compile(r"(time|hash)(?::([0-9.]+)/([0-9.]+)/([0-9.]+))?")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How samples are assigned.

    Attributes:
        kind: ``time`` keeps the order: the first part trains, the last tests. ``hash`` mixes.
            ``files``: the first files train, the last test.
        fractions: shares of train, validation and test; they sum to 1.
        seed: of the hash.
        files: how many train, validate and test.
        firsts: the first sample of validation and that of test, where files decide and their
            samples are counted; see :meth:`of_files`.
    """

    kind: Literal["time", "hash", "files"] = "time"
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15)
    seed: int = 0
    files: tuple[int, int, int] = (0, 0, 0)
    firsts: tuple[int, int] | None = None

    def of_files(self, num_samples: Sequence[int]) -> SplitRule:
        """The rule, when it is known how many samples each file has.

        >>> SplitRule("files", files=(2, 0, 1)).of_files([5, 3, 4]).assign(6, 4, 12).tolist()
        [0, 0, 2, 2]
        """
        if self.kind != "files":
            return self
        test = self.files[0] + self.files[1]
        return replace(self, firsts=(sum(num_samples[: self.files[0]]), sum(num_samples[:test])))

    @property
    def trains(self) -> bool:
        """Whether some samples are for training."""
        return (self.files if self.kind == "files" else self.fractions)[TRAIN] > 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> SplitRule:
        """Read ``time``, ``hash:0.8/0.1/0.1``, ``none`` (all train), or a split for all.

        Raises:
            ConfigError: when the text is none of these or the fractions do not sum to 1.

        >>> SplitRule.parse("hash:0.8/0.1/0.1").fractions
        (0.8, 0.1, 0.1)
        """
        if text == "none" or text in SPLITS:
            first, second, third = (float(text == name) for name in SPLITS)
            return cls("time", (1.0, 0.0, 0.0) if text == "none" else (first, second, third), seed)
        match = _SPEC.fullmatch(text)
        need = "time:A/B/C, hash:A/B/C with A + B + C = 1, none, or a split for all"
        do = "for example --split time:0.7/0.15/0.15"
        if match is None:
            raise ConfigError(f"split `{text}`", need, do)
        try:
            fractions = tuple(float(part) for part in match.groups()[1:] if part is not None)
        except ValueError as error:
            raise ConfigError(f"split `{text}`", need, do) from error
        first, second, third = fractions or cls().fractions
        if abs(first + second + third - 1) > 1e-6 or first <= 0:
            raise ConfigError(
                f"split `{text}` whose parts sum to {first + second + third:g}", need, do
            )
        return cls("hash" if match[1] == "hash" else "time", (first, second, third), seed)

    def assign(self, first: int, count: int, total: int) -> NDArray[np.uint8]:
        """Splits of samples ``first`` to ``first + count`` of ``total``, as places in ``SPLITS``.

        >>> SplitRule("time", (0.5, 0.25, 0.25)).assign(0, 8, 8).tolist()
        [0, 0, 0, 0, 1, 1, 2, 2]
        """
        numbers = np.arange(first, first + count)
        if self.kind != "hash":
            where = numbers
            borders = self.borders(total)
        else:
            where = (mixed(numbers.astype(np.uint64), self.seed) >> np.uint64(11)).astype(np.int64)
            borders = self.borders(2**53)
        return np.searchsorted(np.array(borders), where, side="right").astype(np.uint8)

    @property
    def needs_total(self) -> bool:
        """Whether the number of all samples decides where one belongs."""
        return self.kind == "files" or (self.kind == "time" and max(self.fractions) < 1)

    def borders(self, total: int) -> tuple[int, int]:
        """Where validation and test begin, of so many samples in their order."""
        if self.kind == "files":
            assert self.firsts is not None, "files are counted first"
            return self.firsts
        train, validation, _ = self.fractions
        return round(total * train), round(total * (train + validation))


def mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64 of each number under a seed: uniform, stable for ever."""
    with np.errstate(over="ignore"):
        state = (numbers + np.uint64(seed) * _GOLDEN + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))
