"""What the workers of topic ``tables`` share: small dense heads, so that the tables take the time.

Torch alone.

Shape legend: N batches, B samples of a rank, L ids of a sequence, D dim, S sum of all dims, H
hidden units.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import Case, initial_table

WIDTHS = (8,) * 6 + (16,) * 5 + (32,) * 5 + (64,) * 5 + (128,) * 5
"""Of 26 tables; together as wide as 26 of ``ONE_WIDTH``."""
ONE_WIDTH = 48
HIDDEN = 64
HEAD_STREAM = 4_000_000


def width_of(case: Case, table: int) -> int:
    """Dim of a table: the case's own, or with dim 0 one of ``WIDTHS``."""
    return case.dim or WIDTHS[table]


def weights_of(case: Case, table: int) -> np.ndarray:
    """Starting weights of a table."""
    return initial_table(replace(case, dim=width_of(case, table)), table)


def head(case: Case, width: int) -> Tensor:
    """Fixed weights from ``[B, width]`` to hidden units, which are summed to a logit."""
    drawn = np.random.default_rng([case.seed, HEAD_STREAM]).standard_normal(
        (width, HIDDEN), dtype=np.float32
    )
    return torch.from_numpy(drawn * np.float32(width**-0.5))


def loss_of_pooled(pooled_BS: Tensor, weights_SH: Tensor, labels_B: Tensor) -> Tensor:
    """Mean loss of a batch of pooled embeddings."""
    logits = (pooled_BS @ weights_SH).relu().sum(1) - 1.0
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels_B)


def loss_of_sequences(values_VD: Tensor, weights_DH: Tensor, labels_B: Tensor) -> Tensor:
    """Mean loss of a batch of sequences of one length."""
    per_sample_BLD = values_VD.view(
        labels_B.shape[0], -1, weights_DH.shape[0]
    )  # no len(): TorchRec traces it
    return loss_of_pooled(per_sample_BLD.mean(1), weights_DH, labels_B)


def sequences(ids_NFB: Tensor) -> list[Tensor]:
    """The ids of all samples of each batch in turn, int64 ``[B * L]``.

    A feature of the stored batches is a position.
    """
    return [ids_FB.T.reshape(-1).contiguous() for ids_FB in ids_NFB]
