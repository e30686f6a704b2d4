"""What every exchange is held to (design, section 2), with one rank.

With several: test_world.py.

A new exchange registers itself and adds nothing here.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from exchanges import EXCHANGES
from reference import Reference

import pibroch as pb
from cases import (
    OPTIMIZERS,
    SHAPES,
    as_tensor,
    loss_of,
    optimizers,
    pieces_of,
    ragged_batch,
    records_of,
)
from grids import cells


@pytest.fixture(params=EXCHANGES)
def factory(request):
    return partial(pb.Embeddings, exchange=request.param, seed=3)


@pytest.mark.parametrize(
    ("name", "shape", "kind"), cells(OPTIMIZERS, SHAPES, ["jagged", "weighted", "one_hot"])
)
def test_steps_equal_the_reference(factory, name, shape, kind):
    tables = SHAPES[shape]
    embeddings = factory(tables, optimizers(name, shape))
    reference = Reference(embeddings)
    for step, size in enumerate(
        [8, 3, 1, 0, 13]
    ):  # the last batch of an epoch is ragged, and one may be empty
        batch = ragged_batch(
            tables, size, seed=step, weighted=kind == "weighted", one_hot=kind == "one_hot"
        )
        pooled = embeddings(batch)
        expected = reference.step(batch, loss_of)
        torch.testing.assert_close(as_tensor(pooled).double(), expected, rtol=1e-4, atol=1e-5)
        loss_of(pooled).backward()
        reference.adopt(records_of(pieces_of(embeddings), tables, optimizers(name, shape)))
    assert embeddings.step == 5
    records = records_of(pieces_of(embeddings), tables, optimizers(name, shape))
    np.testing.assert_allclose(records, reference.records, rtol=5e-4, atol=5e-5)


@pytest.mark.parametrize(
    ("shape", "name"), cells(["shared", "odd_dims", "one_feature", "any", "narrow"], OPTIMIZERS)
)
def test_the_number_of_threads_changes_no_bit(factory, name, shape):
    ends = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        embeddings = factory(SHAPES[shape], optimizers(name, shape))
        for step in range(3):
            loss_of(embeddings(ragged_batch(embeddings.tables, 3000, seed=step))).backward()
        ends.append(records_of(pieces_of(embeddings), SHAPES[shape], optimizers(name, shape)))
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])


def test_keys_may_come_in_any_order_and_number(factory):
    tables = SHAPES["odd_dims"]
    embeddings = factory(tables, pb.SGD(lr=0.1)).eval()
    batch = ragged_batch(tables, 6, seed=1, weighted=True)
    extra = pb.JaggedBatch.from_one_hot(
        torch.zeros(6, 0), ["z"], torch.zeros(1, 6, dtype=torch.int64), torch.zeros(6)
    )
    both = pb.JaggedBatch(
        batch.dense,
        (*batch.keys, "z"),
        torch.cat([batch.values, extra.values]),
        torch.cat([batch.offsets, batch.offsets[-1] + extra.offsets[1:]]),
        batch.labels,
        torch.cat([batch.weights, torch.ones(6)]),
    ).select(("z", "c", "a", "b"))
    assert torch.equal(embeddings(both), embeddings(batch))


def test_an_id_outside_its_table_is_named_and_changes_nothing(factory):
    tables = SHAPES["shared"]
    embeddings = factory(tables, pb.SGD(lr=0.1))
    before = embeddings.shard.records.copy()
    batch = ragged_batch(tables, 6, seed=2, one_hot=True)
    batch.values[6 + 4] = 9  # feature y, sample 4
    with pytest.raises(pb.errors.RowIdError, match="id 9 for feature 'y' in sample 4"):
        embeddings(batch)
    batch.values[6 + 4] = -1
    with pytest.raises(pb.errors.RowIdError, match="id -1 for feature 'y' in sample 4"):
        embeddings(batch)
    assert np.array_equal(embeddings.shard.records, before)


def test_evaluation_changes_nothing(factory):
    embeddings = factory(SHAPES["mean"], pb.Adam(lr=0.1))
    before = embeddings.shard.records.copy()
    batch = ragged_batch(SHAPES["mean"], 6, seed=2)
    with torch.no_grad():
        embeddings(batch)
    embeddings.eval()
    assert not embeddings(batch).requires_grad
    assert embeddings.step == 0
    assert np.array_equal(embeddings.shard.records, before)


def test_a_feature_absent_from_a_batch_counts_as_empty_bags(factory, caplog):
    tables = SHAPES["odd_dims"]
    whole = factory(tables, pb.Adagrad(lr=0.5))
    without = factory(tables, pb.Adagrad(lr=0.5))
    batch = ragged_batch(tables, 6, seed=1).select(("a", "c"))
    for _ in range(2):
        expected = whole(batch.with_empty(("b",)))
        pooled = without(batch)
        assert torch.equal(pooled, expected)
        assert not pooled[:, 1].any()
        for each in (expected, pooled):
            loss_of(each).backward()
    assert np.array_equal(whole.shard.records, without.shard.records)
    assert [record.args for record in caplog.records] == [("b",)]  # once, not in each step
    with pytest.raises(pb.errors.DataError, match="without feature 'a'"):
        without(replace(batch.select(("a",)), keys=("A",)))
