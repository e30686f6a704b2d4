"""TorchRec's own objects in pibroch's hands."""

import shared
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType

import pibroch as pb
from pibroch.collectives.samples import samples_of
from pibroch.exchange.empty_batch import without_samples
from pibroch.torchrec import EmbeddingBagCollection


def run(rank, world):
    lengths = torch.ones(6, dtype=torch.int32)
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=lengths, weights=torch.ones(6))
    batch = Batch(torch.randn(3, 4), ids, torch.ones(3))
    empty = without_samples(batch, 3)
    assert (
        isinstance(empty.sparse_features, KeyedJaggedTensor) and empty.sparse_features.stride() == 0
    )
    assert (samples_of(batch), samples_of(empty)) == (3, 0)

    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 8, name) for name in "ab"], optimizer=pb.SGD(lr=0.1)
    )
    loss, _ = DLRMTrain(DLRM(tables, 4, [16, 8], [8, 1]))(empty)
    loss.backward()
    assert tables.step == 1 and loss.isnan()
    fed = iter(tables.feed([batch] * 2, key=lambda each: each.sparse_features))
    next(fed)
    assert tables._as_prepared(batch.to("cpu").sparse_features)[1], (
        "a copy on the same device is known again"
    )

    pooled = tables(ids)
    for groups in ([["a"], ["b"]], [["b", "a"]], [["a"], ["a", "b"]]):
        others = KeyedTensor.regroup([pooled], groups)
        ours = type(pooled).regroup([pooled], groups)
        assert all(torch.equal(one, other) for one, other in zip(others, ours, strict=True))

    for name, value in (
        ("data_type", DataType.FP16),
        ("pooling", PoolingType.NONE),
        ("total_num_buckets", 4),
    ):
        config = EmbeddingBagConfig(num_embeddings=9, embedding_dim=8, name="a", **{name: value})
        try:
            EmbeddingBagCollection([config], optimizer=pb.SGD(lr=0.1))
        except pb.errors.ConfigError:
            continue
        raise AssertionError(f"{name} {value} was taken")
    shared.save("objects", [1.0])
