"""What every exchange does with rows once they are there: pool them, or say that an id has none."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import RowIdError
from pibroch.exchange.grouping import BatchIds
from pibroch.kernels import parallel
from pibroch.kernels.gather_pool import numba as pooling
from pibroch.kernels.memory import can_stream

Records = NDArray[np.float32]


def pool(ids: BatchIds, records: Records, rows: NDArray[np.int64], dim: int) -> Tensor:
    """Pooled embeddings float32 ``[B, F, D]`` from ``records`` ``[rows, W]``, position v from record ``rows[v]``."""
    pooled_BFD = torch.empty(ids.num_samples, ids.num_features, dim)
    out, num_bags = pooled_BFD.numpy(), len(ids.offsets) - 1
    parallel.run(pooling.gather_pool, num_bags, records, rows, ids.offsets, ids.scale, out, can_stream(out))
    return pooled_BFD


def row_id_error(
    features: tuple[str, ...], num_rows: NDArray[np.int64], batch: JaggedBatch, position: int
) -> RowIdError:
    """The error for the id at ``position`` of the batch's values; ``num_rows`` ``[F]`` of the features' tables."""
    bag = int(np.searchsorted(batch.offsets.numpy(), position, side="right")) - 1
    feature, sample = divmod(bag, batch.batch_size)
    return RowIdError(
        f"id {int(batch.values[position])} for feature {features[feature]!r} in sample {sample} of the batch",
        f"an id from 0 to {int(num_rows[feature]) - 1}",
        "encode the data with the table's vocabulary, or give the table more rows",
    )
