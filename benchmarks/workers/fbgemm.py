"""FBGEMM's CPU table-batched embeddings as a case asks for them; needs the peers' environment."""

from __future__ import annotations

from importlib.metadata import version

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.cases import Case, initial_table

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def table_batched_embeddings(case: Case) -> SplitTableBatchedEmbeddingBagsCodegen:
    """All tables in one operator, optimizer fused into backward, weights loaded."""
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.num_rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * case.num_tables,
        optimizer=OPTIMIZERS[case.sparse_optimizer],
        learning_rate=case.sparse_lr,
        eps=case.eps,
        pooling_mode=PoolingMode.MEAN if case.pooling == "mean" else PoolingMode.SUM,
    )
    load_tables(module, case)
    return module


def load_tables(
    module: SplitTableBatchedEmbeddingBagsCodegen, case: Case, order: list[int] | None = None
) -> None:
    """Copy the case's starting weights in.

    ``order`` names the table behind each of the operator's weights.
    """
    weights = module.split_embedding_weights()
    for table, weight in zip(order or range(case.num_tables), weights, strict=True):
        weight.copy_(torch.from_numpy(initial_table(case, table)))


def versions() -> dict[str, str]:
    """Versions of the peers' packages."""
    return {name: version(name) for name in ("torch", "torchrec", "fbgemm_gpu-cpu")}
