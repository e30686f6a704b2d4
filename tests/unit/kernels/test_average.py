import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.errors import ConfigError
from pibroch.kernels.average import naive


def batch_of(ids):
    ids = torch.tensor([ids])
    return pb.JaggedBatch.from_one_hot(
        torch.zeros(ids.shape[1], 0), ["a"], ids, torch.zeros(ids.shape[1])
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [pb.SGD, pb.Adagrad, pb.RowWiseAdam])
def test_lazy_averages_are_those_of_every_step(optimizer, dtype):
    embeddings = pb.Embeddings([pb.Table("a", 20, 3, dtype=dtype)], optimizer(lr=0.3, average=0.9))
    weights = embeddings.shard.weights("a")
    history = []
    history.append(np.array(weights, np.float64))
    rng = np.random.default_rng(0)
    everything = batch_of(list(range(20)))
    for _ in range(30):
        ids = rng.integers(0, rng.integers(1, 19), 6).tolist()
        (embeddings(batch_of(ids)) * torch.linspace(-1, 2, 18).reshape(6, 1, 3)).sum().backward()
        history.append(np.array(weights, np.float64))
        before = embeddings.shard.records.copy()
        with torch.no_grad(), embeddings.averaged():
            averaged = embeddings(everything)[:, 0].numpy()
        np.testing.assert_allclose(averaged, naive.averages(history, 0.9), rtol=1e-4, atol=1e-5)
        assert embeddings.shard.records.tobytes() == before.tobytes()
    with torch.no_grad():
        assert np.array_equal(embeddings(everything)[:, 0].numpy(), weights)


def test_averages_change_no_weight():
    ends = []
    for average in (None, 0.99):
        embeddings = pb.Embeddings([pb.Table("a", 20, 3)], pb.Adam(lr=0.3, average=average))
        for step in range(5):
            embeddings(batch_of([step, 3, 3])).square().sum().backward()
        ends.append(embeddings.shard.weights("a").copy())
    assert np.array_equal(*ends)


def test_no_average_is_an_error():
    embeddings = pb.Embeddings([pb.Table("a", 20, 3)], pb.SGD(lr=0.3))
    with pytest.raises(ConfigError, match="keeps no average"), embeddings.averaged():
        pass
    with pytest.raises(ConfigError, match="average 1"):
        pb.SGD(lr=0.3, average=1.0)
