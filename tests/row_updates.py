"""Optimizers with all their settings, and a step of random rows for their kernels."""

import numpy as np

from pibroch.embedding import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from pibroch.kernels.dedupe.naive import dedupe
from pibroch.kernels.scatter_update import Grouped

OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "sgd_decay": SGD(lr=0.1, weight_decay=0.01),
    "adagrad": Adagrad(lr=0.1, weight_decay=0.01, initial_accumulator=0.1),
    "row_wise_adagrad": RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "row_wise_adagrad_clipped": RowWiseAdagrad(lr=0.1, max_row_norm=0.5),
    "sgd_clipped": SGD(lr=0.1, max_element=0.3, max_row_norm=0.5, weight_decay=0.01),
    "adagrad_clipped": Adagrad(lr=0.1, max_element=0.3, initial_accumulator=0.1),
    "adam": Adam(lr=0.1, weight_decay=0.01),
    "adam_decoupled": Adam(lr=0.1, weight_decay=0.2, decoupled=True),
    "row_wise_adam": RowWiseAdam(lr=0.1, weight_decay=0.01, betas=(0.8, 0.95)),
}


def a_step(dim, width, num_rows=50, num_ids=300, scaled=False, seed=0):
    rng = np.random.default_rng(seed)
    ids = (rng.random(num_ids) ** 8 * num_rows).astype(np.int64)  # row 0 takes most
    rows, segments, order = dedupe(ids, np.arange(num_ids, dtype=np.int32))
    source = rng.permutation(num_ids).astype(np.int32)
    scale = rng.random(num_ids).astype(np.float32) if scaled else np.empty(0, np.float32)
    records = rng.random((num_rows, width)).astype(np.float32)
    return (
        records,
        Grouped(rows, segments, order, source, scale),
        rng.standard_normal((num_ids, dim)).astype(np.float32),
    )


def beside_others(grouped, gradients, unit, behind):
    """The same gradients, each of several rows of ``unit`` floats, followed by others' rows."""
    num_rows = gradients.shape[1] // unit
    wide = np.full((len(gradients), num_rows + behind, unit), np.nan, np.float32)
    wide[:, :num_rows] = gradients.reshape(len(gradients), num_rows, unit)
    source = (grouped.source * (num_rows + behind)).astype(np.int32)
    return grouped._replace(source=source, rows_per_gradient=num_rows), wide.reshape(-1, unit)
