"""Hot ids that are replaced by new ones while samples go on, with effects of their own.

The hot ids of a table are the tenth that is read most. Each place in the order of popularity keeps
its probability, and the id that stands there changes: a share of the hot ones, always those that
stood longest, after every so many samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IDS_PER_HOT = 10


class Drift:
    """Which ids of a table stand where in the order of popularity.

    Ids are numbers: at first those of the places, then in order of their appearance.

    Args:
        num_ids: of the table at a time.
        share: of the hot ids that is replaced.
        every: samples between two replacements.
        num_samples: after which none are replaced any more.
        seed: of the order in which hot ids go.

    Attributes:
        places: of each id that ever appears, where it stands, int64 ``[N]``.

    >>> drift = Drift(20, 0.5, 100, 250, 0)
    >>> drift.places.tolist()[20:] == drift.order.tolist()
    True
    >>> places = np.array([0, 1, 7], np.int32)
    >>> [sorted(drift.ids_at(places, np.full(3, s)).tolist()) for s in (99, 100, 249)]
    [[0, 1, 7], [1, 7, 20], [7, 20, 21]]
    """

    def __init__(self, num_ids: int, share: float, every: int, num_samples: int, seed: int) -> None:
        self._num_ids = num_ids
        self._num_hot = num_ids // IDS_PER_HOT
        self._a_time = share * self._num_hot
        self._every = every
        self.order = np.random.default_rng([seed, num_ids]).permutation(self._num_hot)
        self._turn_of_place = np.argsort(self.order)
        self._most_new = int((max(0, num_samples - 1) // every) * self._a_time)
        new = self.order[np.arange(self._most_new) % max(1, self._num_hot)]
        self.places = np.concatenate([np.arange(num_ids), new])

    def ids_at(self, places: NDArray[np.int32], samples: NDArray[np.int64]) -> NDArray[np.int32]:
        """The ids that stand at some places in some samples, ``[V]`` all."""
        if not self._most_new:
            return places
        is_hot = places < self._num_hot
        turns = self._turn_of_place[places[is_hot]]
        so_far = (samples[is_hot] // self._every * self._a_time).astype(np.int64)
        so_far = np.minimum(so_far, self._most_new)
        rounds = (so_far - turns - 1) // max(1, self._num_hot)  # -1 where the first one stands
        ids = places.copy()
        ids[is_hot] = np.where(
            rounds < 0, places[is_hot], self._num_ids + turns + rounds * self._num_hot
        )
        return ids
