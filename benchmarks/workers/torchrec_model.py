"""TorchRec's own DLRM loaded with a case's starting weights; needs the peers' environment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from benchmarks.cases import BOTTOM_STREAM, TOP_SIZES, TOP_STREAM, Case
from benchmarks.workers import fbgemm
from benchmarks.workers.dlrm import TrainingSubject, linears, load_linears, torch_batches


def table_configs(case: Case) -> list[EmbeddingBagConfig]:
    """One table a feature."""
    return [
        EmbeddingBagConfig(
            name=f"t{t}",
            embedding_dim=case.dim,
            num_embeddings=case.num_rows,
            feature_names=[f"C{t}"],
        )
        for t in range(case.num_tables)
    ]


def torchrec_dlrm(collection: nn.Module, case: Case) -> DLRM:
    """TorchRec's model around a collection, dense weights loaded.

    Its interaction lists the pairs of the upper triangle by rows, the case those of the lower one:
    the first top layer's columns are moved accordingly.
    """
    model = DLRM(
        collection,
        case.num_dense,
        list(case.bottom_sizes[1:]),
        list(TOP_SIZES),
        dense_device=torch.device("cpu"),
    )
    load_linears(linears(model.dense_arch), case, BOTTOM_STREAM)
    top = linears(model.over_arch)
    load_linears(top, case, TOP_STREAM)
    nodes = case.num_tables + 1
    small, large = torch.triu_indices(nodes, nodes, 1)
    lower_position = large * (large - 1) // 2 + small
    with torch.no_grad():
        pairs = top[0].weight[:, case.dim :]
        top[0].weight[:, case.dim :] = pairs[:, lower_position].clone()
    return model


def empty_collection(case: Case) -> EmbeddingBagCollection:
    """A collection without memory, for TorchRec to shard."""
    return EmbeddingBagCollection(device=torch.device("meta"), tables=table_configs(case))


def subject(model: nn.Module, sparse_arch: nn.Module, case: Case) -> TrainingSubject:
    """Training steps of ``model(dense, KeyedJaggedTensor) -> logits [B, 1]``.

    Rows are updated in backward.
    """
    ids_NFB, dense_NBn, labels_NB = torch_batches(case)
    sparse = [_keyed_jagged(ids_FB, case) for ids_FB in ids_NFB]
    dense_parameters = [
        parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name
    ]
    optimizer = torch.optim.SGD(dense_parameters, lr=case.dense_lr)

    def step(batch: int) -> Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(
            model(dense_NBn[batch], sparse[batch]).squeeze(1), labels_NB[batch]
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return TrainingSubject(
        step, lambda batch: sparse_arch(sparse[batch]), fbgemm.versions(), len(ids_NFB)
    )


def _keyed_jagged(ids_FB: Tensor, case: Case) -> KeyedJaggedTensor:
    """Lengths, offsets and per-key counts are all given, so that no step has to compute them."""
    bags = ids_FB.numel()
    return KeyedJaggedTensor(
        keys=[f"C{t}" for t in range(case.num_tables)],
        values=ids_FB.reshape(-1),
        lengths=torch.ones(bags, dtype=torch.int64),
        offsets=torch.arange(bags + 1),
        stride=case.batch_size,
        length_per_key=[case.batch_size] * case.num_tables,
        offset_per_key=[case.batch_size * t for t in range(case.num_tables + 1)],
    )
