"""NumPy's and torch's integers do wherever users give a whole number.

What is none is refused in words.
"""

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch import rpc
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import ConfigError
from pibroch.integers import whole_number
from small_run import make_dataset

KINDS = [np.int64, np.uint8, torch.tensor]


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_and_their_checkpoints(kind, tmp_path):
    table = pb.Table("a", num_rows=kind(5), dim=kind(4))
    assert (table.num_rows, table.dim) == (5, 4) and type(table.num_rows) is int
    embeddings = pb.Embeddings(
        [table], pb.SGD(lr=0.1), "lookahead", kind(3), cache_rows=np.int64(5)
    )
    path = pb.save(tmp_path, embeddings, step=kind(3), keep=kind(2))
    assert path.name == "step-00000003"
    again = pb.Embeddings([pb.Table("a", 5, 4)], pb.SGD(lr=0.1), seed=9)
    pb.load(tmp_path, again)
    assert pb.BoundedLagOptions(bound=kind(2)).given_bound() == 2


def test_loaders(tmp_path):
    split = EncodedDataset.open(make_dataset(tmp_path, num_samples=200)).split("train")
    numbers = np.array([64, 1, 0, 2])
    loader = Loader(split, numbers[0], seed=numbers[1], shuffle=True, part=(numbers[2], numbers[3]))
    plain = Loader(split, 64, seed=1, shuffle=True, part=(0, 2))
    assert torch.equal(next(iter(loader)).values, next(iter(plain)).values)
    assert type(loader.position.sample) is int, "it goes into checkpoints"


def test_rpc(tmp_path):
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=np.int64(2), init_method=f"file://{tmp_path}/store"
    )
    rpc.init_rpc("one", rank=np.int64(0), world_size=np.int64(1), rpc_backend_options=options)
    try:
        assert rpc.rpc_sync(np.int64(0), torch.add, (torch.ones(1), 1)).item() == 2
        with rpc.autograd.context() as context:
            weight = torch.ones(2, requires_grad=True)
            rpc.autograd.backward(np.int64(context), [weight.sum()])
            assert torch.equal(rpc.autograd.get_gradients(np.int64(context))[weight], torch.ones(2))
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("value", [True, 5.0, "5", None, np.float64(5), torch.tensor([1, 2]), -1])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"step .*need a whole number of at least 0"):
        whole_number(value, "step")
    with pytest.raises(ConfigError, match="table 'a' with num_rows"):
        pb.Table("a", value, 4)
