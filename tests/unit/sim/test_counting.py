"""Counting without numbers: the same counts, in the memory of one rank."""

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.config import load_recipe
from pibroch.data import EncodedDataset, JaggedBatch
from pibroch.embedding import group_tables
from pibroch.observability.memory import rss_bytes
from pibroch.planner import Plan
from pibroch.sim.counting import Job, count
from pibroch.sim.recipe import Workload

TOWERS = ["embedding.exchange.ranks_per_host=2"]
RECIPES = {
    "alltoall": ("synthetic_small", ["embedding.exchange=alltoall"]),
    "lookahead": ("synthetic_small_lookahead", ["embedding.exchange.lookahead=3"]),
    "modules": ("synthetic_small_towers", TOWERS),
    "towers": ("synthetic_small_towers", [*TOWERS, "model.towers.pass_through=true"]),
}
CASES = [
    ("alltoall", "row_wise", "bfloat16"),
    ("alltoall", "table_wise", "float32"),
    ("alltoall", "table_wise_pooled", "float16"),
    ("alltoall", "row_wise_pooled", "float32"),
    ("alltoall", "column_wise", "float32"),
    ("lookahead", "row_wise", "float32"),
    ("lookahead", "row_wise", "bfloat16"),
    ("modules", "row_wise", "float32"),
    ("towers", "row_wise", "bfloat16"),
    ("towers", "column_wise", "float32"),
]
RECORDS = ["embedding.dtype='bfloat16'", "train.average=0.9"]


@pytest.mark.parametrize(
    ("exchange", "placement", "wire", "records"),
    [
        *((*case, None) for case in CASES),
        *((*CASES[case], each) for case in (0, 2, 5) for each in RECORDS),
    ],
)
def test_the_counts_are_those_of_rows_with_numbers(data, exchange, placement, wire, records):
    recipe, changes = RECIPES[exchange]
    changes = changes + ([] if records is None else [records])
    options = {"wire": wire} | ({} if exchange == "lookahead" else {"placement": placement})
    changes = changes + [f"embedding.exchange.{key}={value!r}" for key, value in options.items()]
    workload = Workload.of(load_recipe(recipe, changes), EncodedDataset.open(data))

    def counted(seed):
        job = workload.job(4, 48, seed, ranks_per_host=2)
        return count(job, 3 if exchange == "lookahead" else 2)

    for with_numbers, without in zip(counted(7), counted(None), strict=True):
        assert [each.name for each in with_numbers.operations] == [
            each.name for each in without.operations
        ]
        for one, other in zip(with_numbers.operations, without.operations, strict=True):
            np.testing.assert_array_equal(one.parts, other.parts, one.name)
            np.testing.assert_array_equal(one.sent, other.sent, one.name)
        for name, held in with_numbers.held.items():
            np.testing.assert_array_equal(held, without.held[name], name)
        assert sum(each.sum() for one in without.operations for each in one.sent) > 1000


def test_neither_rows_nor_messages_take_memory():
    size, rows, dim, samples = 8, 4_000_000, 256, 2048
    tables = [pb.Table("x", rows, dim), pb.Table("y", rows, dim)]

    def batch_of(step, rank):
        ids = np.random.default_rng([step, rank]).integers(rows, size=(2, samples))
        zeros = torch.zeros(samples, 1)
        return JaggedBatch.from_one_hot(zeros, ["x", "y"], torch.from_numpy(ids), zeros[:, 0])

    plan = Plan.of(tables, size, "row_wise")
    job = Job(group_tables(tables, pb.Adagrad(lr=0.1)), plan, batch_of)
    before = rss_bytes()
    (step,) = count(job, 1)
    assert step["fetch"].sent[0].sum() == pytest.approx(
        2 * size * samples * dim * 4 * 7 / 8, rel=0.02
    )
    # rows and their state would be 16 GB; malloc keeps what the ranks' threads have freed
    assert rss_bytes() - before < 250e6
