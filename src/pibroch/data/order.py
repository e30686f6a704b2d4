"""The order of samples in an epoch: a pure function of seed, epoch and number of samples.

Shuffling is by blocks, so that a dataset larger than memory is read in long runs: the blocks of
consecutive samples are permuted, then 64 of them at a time form a group whose samples are permuted.
Datasets of up to one group (262,144 samples) are shuffled in full.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_SAMPLES = 4096
GROUP_BLOCKS = 64


class EpochOrder:
    """The order of one epoch.

    Args:
        num_samples: N.
        seed: of the run.
        epoch: number of the epoch.
        block_samples: consecutive samples that stay together until their group is shuffled.
        group_blocks: blocks shuffled together.

    >>> order = EpochOrder(10, seed=1, epoch=0, block_samples=2, group_blocks=2)
    >>> sorted(order.take(0, 10).tolist()) == list(range(10))
    True
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        epoch: int,
        block_samples: int = BLOCK_SAMPLES,
        group_blocks: int = GROUP_BLOCKS,
    ) -> None:
        self._num_samples = num_samples
        self._key = (seed, epoch)
        self._block_samples = block_samples
        num_blocks = -(-num_samples // block_samples)
        blocks = np.random.default_rng([*self._key, 0]).permutation(num_blocks)
        self._groups = [blocks[i : i + group_blocks] for i in range(0, num_blocks, group_blocks)]
        sizes = [int((self._stops(group) - group * block_samples).sum()) for group in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._shuffled: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample numbers at places ``start`` to ``stop`` of the epoch, int64."""
        parts = []
        group_id = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first = int(self._starts[group_id])
            after = int(self._starts[group_id + 1])
            parts.append(self._group(group_id)[start - first : min(stop, after) - first])
            start = min(stop, after)
            group_id = group_id + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _stops(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum((blocks + 1) * self._block_samples, self._num_samples)

    def _group(self, group_id: int) -> NDArray[np.int64]:
        if self._shuffled[0] != group_id:
            blocks = self._groups[group_id]
            stops = self._stops(blocks)
            runs = [
                np.arange(b * self._block_samples, stop)
                for b, stop in zip(blocks, stops, strict=True)
            ]
            samples = np.concatenate(runs)
            np.random.default_rng([*self._key, 1, group_id]).shuffle(samples)
            self._shuffled = (group_id, samples)
        return self._shuffled[1]
