"""Users of a model whom nobody has to name: an index of items is measured by them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.serve.predictor import Predictor

_SEED = 67
_LONGEST = 16
"""Of lists and histories."""


def sampled_users(predictor: Predictor, count: int) -> JaggedBatch:
    """Samples whose ids are drawn among those that have rows, and whose numbers are normal.

    The same ones for the same version. Ids of a feature are drawn alike, whatever others are.
    """
    schema = predictor.schema
    random = np.random.default_rng(_SEED)
    values: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for feature in schema.categorical:
        longest = min(feature.max_length or _LONGEST, _LONGEST) if feature.multi_hot else 1
        lengths.append(random.integers(1, longest + 1, count))
        ids = predictor.ids_with_rows(feature)
        total = int(lengths[-1].sum())
        if isinstance(ids, range):
            values.append(random.integers(ids.start, ids.stop, total))
        else:
            values.append(random.choice(ids, total) if len(ids) else np.zeros(total, np.int64))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return JaggedBatch(
        torch.from_numpy(random.standard_normal((count, len(schema.dense)), np.float32)),
        schema.keys,
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(offsets),
        torch.zeros(count),
    )
