"""Embeddings of several dims are written side by side.

Nothing is put together after, or taken apart before an update.
"""

import pytest
import torch

import pibroch as pb

DIMS = {"a": 4, "b": 6, "c": 4, "d": 1}  # those of one group do not stand together


def embeddings_of(kind):
    tables = [pb.Table(name, 9, dim) for name, dim in DIMS.items()]
    return pb.Embeddings(tables, pb.SGD(lr=1.0), **kind)


def batch_of(ids):
    ids = torch.tensor(ids)
    size = ids.shape[1]
    return pb.JaggedBatch.from_one_hot(torch.zeros(size, 0), list(DIMS), ids, torch.zeros(size))


@pytest.mark.parametrize("exchange", ["local", "alltoall", "lookahead"])
def test_all_is_one_tensor_and_parts_are_views_of_it(exchange):
    embeddings = embeddings_of({"exchange": exchange})
    out = embeddings(batch_of([[1, 2], [3, 3], [0, 8], [5, 6]]))
    assert out.cat().shape == (2, 15)
    assert out.cat() is out.cat()
    assert torch.equal(torch.cat(list(out.values()), 1), out.cat())
    assert {part.untyped_storage().data_ptr() for part in out.values()} == {
        out.cat().untyped_storage().data_ptr()
    }


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_come_from_the_columns_of_the_whole(whole):
    embeddings = embeddings_of({})
    ids = [[1, 2], [3, 3], [0, 8], [5, 6]]
    before = {
        name: embeddings.full_state_dict()[f"embedding_bags.{name}.weight"].clone() for name in DIMS
    }
    out = embeddings(batch_of(ids))
    factors = torch.arange(30.0).view(2, 15)
    loss = (out.cat() * factors).sum() if whole else None
    parts = dict(zip(DIMS, factors.split(list(DIMS.values()), 1), strict=True))
    (loss if whole else sum((out[name] * parts[name]).sum() for name in DIMS)).backward()
    for number, name in enumerate(DIMS):
        expected = before[name].index_add(0, torch.tensor(ids[number]), -parts[name])
        assert torch.equal(embeddings.full_state_dict()[f"embedding_bags.{name}.weight"], expected)


def test_a_feature_that_is_not_used_gets_zeros():
    embeddings = embeddings_of({})
    before = embeddings.full_state_dict()["embedding_bags.b.weight"].clone()
    embeddings(batch_of([[1], [3], [0], [5]]))["a"].sum().backward()
    assert torch.equal(embeddings.full_state_dict()["embedding_bags.b.weight"], before)
