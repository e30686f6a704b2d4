"""Batches of raw ids, of which some are hot and some were never there before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BATCH_IDS = 53_000
HOT_IDS = 10_000  # of a batch, distinct
NEW_IDS = 10_000  # of a batch, each once
HOT_POOL = 20_000


class Stream:
    """Batches of ids without end."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._pool = self.new(HOT_POOL)

    def batch(self) -> NDArray[np.int64]:
        """The next one, int64 ``[V]``."""
        hot = self._generator.choice(self._pool, HOT_IDS, replace=False)
        again = self._generator.choice(hot, BATCH_IDS - HOT_IDS - NEW_IDS)
        ids = np.concatenate([hot, again, self.new(NEW_IDS)])
        self._generator.shuffle(ids)
        return ids

    def new(self, num: int) -> NDArray[np.int64]:
        """Ids that nobody has seen, int64 ``[num]``."""
        return self._generator.integers(-(1 << 63), 1 << 63, num)
