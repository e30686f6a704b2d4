"""Tables of 16 bits as programs know them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.embedding import MemoryShard, SparseOptimizer, group_tables
from pibroch.embedding.narrow_rows import NarrowRows
from pibroch.errors import ConfigError
from pibroch.kernels.narrow.naive import nearest, widened

WIDE, NARROW = (
    pb.Table("a", 700, 5, initializer=pb.Normal(1.0), dtype=dtype)
    for dtype in ("float32", "bfloat16")
)
OPTIMIZERS = [
    pb.SGD(lr=0.1),
    pb.Adagrad(lr=0.1),
    pb.RowWiseAdam(lr=0.1),
    pb.Adam(lr=0.1, average=0.9),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_initial_weights_are_those_of_float32_rounded_and_state_is_the_same(optimizer):
    wide, narrow = (MemoryShard.whole([table], optimizer, 3) for table in (WIDE, NARROW))
    assert np.array_equal(narrow.weights("a"), widened(nearest(wide.weights("a"))))
    for field, numbers in narrow.state("a").items():
        assert np.array_equal(
            numbers, narrow.weights("a") if field == "average" else wide.state("a")[field]
        )


def test_bytes_are_those_that_are_held():
    sizes = [
        pb.Embeddings([table], optimizer).num_bytes
        for optimizer in OPTIMIZERS
        for table in (WIDE, NARROW)
    ]
    assert sizes == [700 * 4 * floats for floats in (5, 3, 10, 8, 11, 9, 21, 19)]
    even = [
        pb.Embeddings([pb.Table("a", 9, 64, dtype=dtype)], OPTIMIZERS[0]).num_bytes
        for dtype in ("float32", "bfloat16")
    ]
    assert even == [9 * 256, 9 * 128]


def test_numbers_are_read_as_float32_and_written_to_the_nearest():
    rows = NarrowRows(np.zeros((6, 3), np.uint16))
    written = np.random.default_rng(0).normal(size=(6, 3))
    rows[:] = written
    assert np.array_equal(rows[:], widened(nearest(written)))
    assert (
        np.array_equal(np.asarray(rows), rows.copy())
        and rows[:].dtype == np.asarray(rows).dtype == rows.dtype
    )
    assert (rows.shape, rows.ndim, len(rows), rows.size, rows.nbytes) == ((6, 3), 2, 6, 18, 72)
    rows[[1, 4]] = 2.0
    rows[::2, 1:] = np.ones((3, 2))
    rows[:] *= 0.5
    expected = widened(nearest(written))
    expected[[1, 4]] = 2.0
    expected[::2, 1:] = 1.0
    assert np.array_equal(rows[:], expected * 0.5)
    assert rows.as_tensor().dtype == torch.bfloat16 and rows.as_tensor()[4, 2] == 0.5
    rows.as_tensor()[4, 2] = 8.0
    assert rows[4:5, 2:] == 8.0


def test_a_state_dict_has_views_in_16_bits_and_takes_any_type():
    embeddings = pb.Embeddings([NARROW], pb.Adagrad(lr=0.1), seed=1)
    name = "embedding_bags.a.weight"
    weights = embeddings.state_dict()[name]
    assert weights.dtype == torch.bfloat16 and weights.shape == (700, 5)
    assert np.array_equal(weights.float().numpy(), embeddings.shard.weights("a"))
    given = torch.randn(700, 5)
    embeddings.load_state_dict({name: given})
    assert torch.equal(weights, given.bfloat16())
    other = pb.Embeddings([NARROW], pb.Adagrad(lr=0.1), seed=2)
    other.load_state_dict(embeddings.state_dict())
    assert np.array_equal(other.shard.weights("a"), embeddings.shard.weights("a"))


def test_whole_states_are_float32_and_load_as_they_were_saved():
    tables = [NARROW, pb.Table("b", 9, 5)]
    first, second, third = (
        pb.Embeddings(tables, pb.Adam(lr=0.1, average=0.9), seed=seed) for seed in (1, 2, 3)
    )
    state = first.full_state_dict(row_state=True)
    assert {numbers.dtype for numbers in state.values()} == {torch.float32}
    second.load_full_state_dict(state)
    third.stateful().load_state_dict(first.stateful().state_dict())
    for shard, *others in zip(
        *(each.exchange.shards for each in (first, second, third)), strict=True
    ):
        assert all(shard.records.tobytes() == other.records.tobytes() for other in others)


def test_weights_from_outside_are_rounded():
    embeddings = pb.Embeddings([NARROW], pb.SGD(lr=0.1))
    given = np.random.default_rng(1).normal(size=(700, 5))
    embeddings.load_weights("a", given)
    assert np.array_equal(embeddings.shard.weights("a"), widened(nearest(given)))


def test_groups_are_of_one_type():
    tables = [
        WIDE,
        pb.Table("b", 9, 5, dtype="bfloat16"),
        pb.Table("c", 9, 5),
        pb.Table("d", 9, 5, dtype="bfloat16"),
    ]
    groups = group_tables(tables, pb.SGD(lr=0.1))
    assert [(group.space.dtype, group.space.features) for group in groups] == [
        ("float32", ("a", "c")),
        ("bfloat16", ("b", "d")),
    ]


def test_an_optimizer_that_has_no_kernel_for_them_is_refused():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Own(SparseOptimizer):
        kernel = staticmethod(pb.SGD.kernel)

        def moments(self, dim):
            return {}

    assert pb.Embeddings([WIDE], Own(lr=0.1)).num_bytes
    with pytest.raises(ConfigError, match="table 'a' of bfloat16 with Own"):
        pb.Embeddings([NARROW], Own(lr=0.1))


def test_small_steps_arrive_in_the_mean(monkeypatch):
    """Steps of a sixteenth of what 16 bits tell apart at 1: to the nearest, nothing ever moves."""
    table = pb.Table("a", 400, 16, initializer=pb.Uniform(0.0, center=1.0), dtype="bfloat16")
    ids = torch.arange(400).view(1, -1)
    num_steps = 64
    spacing = 2.0**-7
    batch = pb.JaggedBatch.from_one_hot(torch.zeros(400, 0), ["a"], ids, torch.zeros(400))
    steps = (
        spacing
        / 16
        * torch.from_numpy(
            np.random.default_rng(0).uniform(0.5, 1.5, (num_steps, 400, 1, 16))
        ).float()
    )

    def moved():
        embeddings = pb.Embeddings([table], pb.SGD(lr=1.0))
        for step in steps:
            (embeddings(batch) * -step).sum().backward()
        return np.array(embeddings.shard.weights("a"), np.float64) - 1.0

    rounded = moved()
    given = steps.sum(0)[:, 0].double().numpy()
    one_error = spacing * np.sqrt(num_steps / 16 * 15 / 16)  # of one weight: a draw a step
    assert abs((rounded - given).mean()) < 5 * one_error / np.sqrt(rounded.size)
    assert (rounded - given).std() < 1.2 * one_error
    monkeypatch.setattr("pibroch.embedding.rows.ROUNDS_STOCHASTICALLY", False)
    assert not moved().any()
