"""TorchRec's DLRM on its ``FusedEmbeddingBagCollection``, without sharding machinery."""

from __future__ import annotations

import torch
import torchrec.optim
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers.dlrm import TrainingSubject
from benchmarks.workers.torchrec_model import subject, table_configs, torchrec_dlrm

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
}


def build(case: Case) -> TrainingSubject:
    """The contender for one case."""
    torch.set_num_threads(case.threads)
    arguments = {"lr": case.sparse_lr} | (
        {} if case.sparse_optimizer == "sgd" else {"eps": case.eps}
    )
    collection = FusedEmbeddingBagCollection(
        table_configs(case), OPTIMIZERS[case.sparse_optimizer], arguments
    )
    for lookup in collection._emb_modules:
        fbgemm.load_tables(lookup._emb_module, case)
    model = torchrec_dlrm(collection, case)
    return subject(model, model.sparse_arch, case)
