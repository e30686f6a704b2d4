"""Random numbers and draws from given distributions, by counters instead of a state."""

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.sampling.numba import alias_table, draw_ids, uniform

__all__ = ["alias_table", "draw_ids", "stream_keys", "uniform"]


def stream_keys(seed: int, count: int) -> NDArray[np.uint64]:
    """Keys of ``count`` independent streams, uint64."""
    return np.random.SeedSequence(seed).generate_state(count, np.uint64).astype(np.uint64)
