import pytest
import torch

import pibroch as pb
from pibroch.errors import ConfigError, DataError, RowIdError, TrainingError
from pibroch.exchange.rows import IDS_PER_FEATURE


class Keyed:
    """The three methods of a KeyedJaggedTensor."""

    def __init__(self, keys, values, lengths):
        self._parts = keys, values, lengths

    def keys(self):
        return self._parts[0]

    def values(self):
        return self._parts[1]

    def lengths(self):
        return self._parts[2]


def two_tables(optimizer=None):
    return pb.Embeddings(
        [pb.Table("a", 9, 4), pb.Table("b", 5, 4)], optimizer=optimizer or pb.SGD(lr=1.0)
    )


def one_hot(ids):
    ids = torch.tensor(ids)
    size = ids.shape[1]
    return pb.JaggedBatch.from_one_hot(torch.zeros(size, 0), ["a", "b"], ids, torch.zeros(size))


def test_takes_anything_keyed_and_jagged():
    embeddings = two_tables()
    keyed = Keyed(
        ["a", "b"],
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([2, 0, 0, 1], dtype=torch.int32),
    )
    pooled = embeddings(keyed)
    weights = embeddings.shard.weights("a")
    torch.testing.assert_close(pooled[0, 0].detach(), torch.from_numpy(weights[1] + weights[2]))
    assert (pooled[1, 0] == 0).all()


@pytest.mark.parametrize(
    "batch", [3, {"a": [1]}, Keyed(["a", "b"], torch.tensor([1]), torch.tensor([1]))]
)
def test_other_things_are_refused(batch):
    with pytest.raises(DataError):
        two_tables()(batch)


def test_a_second_backward_is_refused():
    embeddings = two_tables()
    loss = embeddings(one_hot([[1], [1]])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="second backward"):
        loss.backward()
    assert embeddings.step == 1


def test_learning_rate_can_change_between_steps():
    embeddings = two_tables()
    before = embeddings.shard.weights("a")[1].copy()
    embeddings.learning_rate = 0.25
    embeddings(one_hot([[1], [1]])).sum().backward()
    assert embeddings.shard.weights("a")[1].tolist() == (before - 0.25).tolist()


def test_state_dict_uses_torchrec_names_and_loads_back():
    source = two_tables()
    target = two_tables(pb.Adam(lr=0.1))
    source.shard.weights("a")[:] = 7
    assert list(source.state_dict()) == ["embedding_bags.a.weight", "embedding_bags.b.weight"]
    target.load_state_dict(source.state_dict())
    assert (target.shard.weights("a") == 7).all()
    assert (target.shard.state("a")["exp_avg"] == 0).all()
    bad = source.state_dict() | {"embedding_bags.a.weight": torch.zeros(3, 4)}
    with pytest.raises(RuntimeError, match=r"embedding_bags\.a\.weight"):
        target.load_state_dict(bad)


def test_tables_are_no_parameters_and_bf16_gradients_work():
    embeddings = two_tables()
    assert sum(each.numel() for each in embeddings.parameters()) == 0
    with torch.autocast("cpu", torch.bfloat16):
        pooled = embeddings(one_hot([[1, 2], [1, 1]]))
        (pooled.flatten(1) @ torch.ones(8, 3)).float().sum().backward()
    assert embeddings.step == 1


def test_wrong_exchange_and_optimizer_are_refused():
    with pytest.raises(ConfigError, match="telepathy"):
        pb.Embeddings([pb.Table("a", 9, 4)], pb.SGD(lr=1.0), exchange="telepathy")
    with pytest.raises(ConfigError, match="SGD"):
        pb.Embeddings([pb.Table("a", 9, 4)], torch.optim.SGD([torch.zeros(1)], lr=1.0))


def test_frozen_tables_do_not_move_by_a_bit_and_thaw():
    embeddings = two_tables(pb.Adagrad(lr=1.0))
    dense = torch.nn.Linear(4, 1)
    assert embeddings.requires_grad_(False) is embeddings
    before = embeddings.shard.records.copy()
    for batch in embeddings.feed([one_hot([[1], [1]])] * 3):
        pooled = embeddings(batch)
        assert not pooled.requires_grad
        dense(pooled).sum().backward()
    assert dense.weight.grad is not None, "the dense layers go on learning"
    assert (embeddings.shard.records == before).all() and embeddings.step == 0
    embeddings.requires_grad_()
    embeddings(one_hot([[1], [1]])).sum().backward()
    assert (embeddings.shard.records != before).any()


def test_whole_tables_by_name_and_an_unknown_one():
    embeddings = pb.Embeddings([pb.Table("a", 3, 2), pb.Table("b", 4, 2)], pb.Adagrad(lr=0.1))
    state = embeddings.full_state_dict(["b"], row_state=True)
    assert [*state] == ["embedding_bags.b.weight", "embedding_bags.b.sum"]
    with pytest.raises(pb.errors.ConfigError, match="table 'c'; need one of a, b"):
        embeddings.full_state_dict(["c"])
    with pytest.raises(pb.errors.CheckpointError, match=r"no 'embedding_bags\.a\.weight'"):
        embeddings.load_full_state_dict(state)
    with pytest.raises(pb.errors.CheckpointError, match=r"no 'embedding_bags\.b\.weight'"):
        embeddings.load_full_state_dict(
            {"embedding_bags.b.sum": state["embedding_bags.b.sum"]}, strict=False
        )


@pytest.mark.parametrize("num_samples", [3, IDS_PER_FEATURE])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_only_read_is_what_is_trained_on(num_samples, weighted):
    """Large batches that are only read have no row ids."""
    tables = [pb.Table("a", 90, 4), pb.Table("b", 50, 4, pooling="mean")]
    embeddings = pb.Embeddings(tables, optimizer=pb.SGD(lr=1.0))
    offsets = torch.arange(2 * num_samples + 1) * 3
    values = torch.randint(0, 50, (6 * num_samples,), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(6 * num_samples) if weighted else None

    def batch(values):
        size = num_samples
        return pb.JaggedBatch(
            torch.zeros(size, 0), ("a", "b"), values, offsets, torch.zeros(size), weights
        )

    trained = embeddings(batch(values)).detach()
    with torch.no_grad():
        assert torch.equal(embeddings(batch(values)), trained)
        values[-1] = 50
        with pytest.raises(RowIdError, match=f"id 50 for feature 'b' in sample {num_samples - 1}"):
            embeddings(batch(values))
