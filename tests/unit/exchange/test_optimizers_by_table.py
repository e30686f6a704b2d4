"""An optimizer for each table.

Frozen ones do not move, torch's schedulers drive the rates, decoupled decay is torch's.
"""

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.errors import ConfigError

TABLES = [pb.Table("a", 9, 4), pb.Table("b", 9, 4), pb.Table("c", 9, 8)]


def make_batch(seed=0):
    ids = torch.randint(0, 9, (3, 6), generator=torch.Generator().manual_seed(seed))
    return pb.JaggedBatch.from_one_hot(torch.zeros(6, 0), ["a", "b", "c"], ids, torch.zeros(6))


def weights_of(embeddings):
    return {view.piece.table.name: view.weights.copy() for view in embeddings.pieces()}


def train(embeddings, steps=1):
    for step in range(steps):
        out = embeddings(make_batch(step))
        sum((out[name] ** 2).sum() for name in "abc").backward()


def test_a_frozen_table_does_not_move_by_a_bit():
    embeddings = pb.Embeddings(TABLES, {"": pb.Adam(lr=0.1, weight_decay=0.1), "b": pb.Frozen()})
    for view in embeddings.pieces():
        view.weights[0] = -0.0  # of which x - 0 is another zero
    embeddings.start_marks("full")
    before = weights_of(embeddings)
    train(embeddings, steps=3)
    after = weights_of(embeddings)
    assert before["b"].tobytes() == after["b"].tobytes()
    assert (before["a"] != after["a"]).any() and (before["c"] != after["c"]).any()
    assert (
        not next(view for view in embeddings.pieces() if view.piece.table.name == "b")
        .marks["full"]
        .any()
    )


def test_schedulers_of_torch_drive_the_rates_of_rows():
    embeddings = pb.Embeddings(TABLES, {"": pb.SGD(lr=1.0), "c": pb.SGD(lr=0.5)}, seed=1)
    by_hand = pb.Embeddings(TABLES, {"": pb.SGD(lr=1.0), "c": pb.SGD(lr=0.5)}, seed=1)
    optimizer = embeddings.fused_optimizer
    assert [group["tables"] for group in optimizer.param_groups] == [["a", "b"], ["c"]]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(3):
        train(embeddings)
        optimizer.step()
        scheduler.step()
        by_hand.learning_rate = 0.5**step
        assert by_hand.fused_optimizer.learning_rates == [0.5**step, 0.5 ** (step + 1)]
        train(by_hand)
    for name, weights in weights_of(embeddings).items():
        assert np.array_equal(weights, weights_of(by_hand)[name])
    saved = optimizer.state_dict()
    fresh = pb.Embeddings(TABLES, {"": pb.SGD(lr=1.0), "c": pb.SGD(lr=0.5)})
    fresh.fused_optimizer.load_state_dict(saved)
    assert fresh.fused_optimizer.learning_rates == [0.125, 0.0625]


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_decoupled_decay_is_that_of_torch(name):
    """Every row is touched in each step, so that lazy and dense updates are the same."""
    optimizer = {"Adam": pb.Adam, "SGD": pb.SGD}[name](lr=0.1, weight_decay=0.3, decoupled=True)
    embeddings = pb.Embeddings([pb.Table("a", 5, 4)], optimizer)
    dense = torch.nn.Parameter(torch.tensor(embeddings.shard.weights("a").copy()))
    torch_optimizer = (
        torch.optim.AdamW([dense], lr=0.1, weight_decay=0.3) if name == "Adam" else None
    )
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(5, 0), ["a"], torch.arange(5)[None], torch.zeros(5)
    )
    target = torch.linspace(-1, 1, 20).view(5, 4)
    for _ in range(5):
        ((embeddings(batch)[:, 0] - target) ** 2).sum().backward()
        loss = ((dense - target) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, dense)
        if torch_optimizer is None:
            dense.data = dense.data * (1 - 0.1 * 0.3) - 0.1 * gradient
        else:
            dense.grad = gradient
            torch_optimizer.step()
    torch.testing.assert_close(
        torch.from_numpy(embeddings.shard.weights("a")), dense.data, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"a": pb.SGD(lr=1.0)}, "no optimizer for table 'b'"),
        ({"": pb.SGD(lr=1.0), "d": pb.SGD(lr=1.0)}, "an optimizer for table 'd'"),
        ({"": pb.SGD(lr=1.0), "a": None}, "a NoneType as sparse optimizer"),
        (
            torch.optim.SGD([torch.zeros(1)], lr=1.0),
            "a SGD as sparse optimizer; need one of pibroch's",
        ),
    ],
)
def test_optimizers_that_do_not_fit(optimizer, message):
    with pytest.raises(ConfigError, match=message):
        pb.Embeddings(TABLES, optimizer)
