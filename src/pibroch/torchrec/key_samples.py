"""How many samples each key of ragged ids has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from pibroch.errors import DataError


@dataclass(frozen=True, slots=True)
class KeySamples:
    """Numbers of samples.

    Attributes:
        by_rank: for each key its samples on each rank; on one where only their sum is known.
        stride: of all keys; the largest one where they differ.
        varies: whether each key has a number of its own.
    """

    by_rank: list[list[int]]
    stride: int
    varies: bool

    @classmethod
    def of(
        cls,
        num_keys: int,
        num_lengths: int,
        stride: int | None,
        by_rank: Sequence[Sequence[int]] | Tensor | None,
    ) -> Self:
        """What keys and lengths say, with what the user says of them.

        Raises:
            DataError: when these do not fit together.

        Example:
            >>> KeySamples.of(2, 6, None, None)
            KeySamples(by_rank=[[3], [3]], stride=3, varies=False)
            >>> KeySamples.of(2, 6, None, [[2], [3, 1]])
            KeySamples(by_rank=[[2], [3, 1]], stride=4, varies=True)
        """
        if by_rank is None:
            each = num_lengths // max(1, num_keys) if stride is None else stride
            samples = cls([[each]] * num_keys, each, False)
        else:
            listed = by_rank.tolist() if isinstance(by_rank, Tensor) else [*map(list, by_rank)]
            largest = max(map(sum, listed), default=0)
            samples = cls(listed, largest if stride is None else stride, True)
        if len(samples.by_rank) != num_keys or sum(samples.per_key()) != num_lengths:
            said = f" of {samples.per_key()} samples" if samples.varies else ""
            said += f" and {stride} samples" if stride is not None and not samples.varies else ""
            raise DataError(
                f"{num_lengths} lengths for {num_keys} keys{said}",
                "a length for each key and sample",
            )
        return samples

    def per_key(self) -> list[int]:
        """Samples of each key."""
        return [sum(each) for each in self.by_rank]

    def given(self) -> list[list[int]] | None:
        """The argument ``by_rank`` that gives the same again."""
        return self.by_rank if self.varies else None
