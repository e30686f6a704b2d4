"""The exchange by towers with modules between its halves, over processes that stand for hosts."""

from functools import cache

import numpy as np
import pytest
import torch
import tower_cases as cases

import pibroch as pb
from pibroch.planner import Plan
from pibroch.planner.plan import Placement

HOSTS = {
    "2 x 2": (4, {"ranks_per_host": 2}),
    "4 x 1, two hosts a tower": (4, {"ranks_per_host": 1, "hosts_per_tower": 2}),
    "3 x 1": (3, {"ranks_per_host": 1}),
    "2 + 1": (3, {"ranks_per_host": 2}),
}


def rows_of(results):
    outcomes = {}
    for *_, pieces in results:
        for name, rows, columns, weights in pieces:
            table = outcomes.setdefault(name, np.full((30, cases.DIM), np.nan))
            table[np.arange(30)[rows.start : rows.stop : rows.step][:, None], list(columns)] = (
                weights
            )
    return outcomes


NUM_STEPS = 30  # every third with a rank that has no samples


@pytest.fixture(scope="module")
def of_alltoall(worlds):
    """``of_alltoall(size, name)``.

    What training by alltoall gives, once for all that are compared with it.
    """
    return cache(
        lambda size, name: worlds(size).run(
            cases.train, NUM_STEPS, name, exchange="alltoall", placement="table_wise"
        )
    )


@pytest.mark.parametrize(
    ("hosts", "name"), [*((hosts, "tower_dlrm") for hosts in HOSTS), ("2 x 2", "tower_dcn")]
)
def test_with_modules_it_trains_the_model_of_alltoall(worlds, of_alltoall, hosts, name):
    size, options = HOSTS[hosts]
    right = of_alltoall(size, name)
    actual = worlds(size).run(
        cases.train, NUM_STEPS, name, exchange="towers", placement="table_wise", **options
    )
    for (logits, losses, state, _), (other_logits, other_losses, other_state, _) in zip(
        actual, right, strict=True
    ):
        for own, other in zip(logits[:3], other_logits[:3], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
        torch.testing.assert_close(logits[3], other_logits[3], rtol=0, atol=1e-5)
        np.testing.assert_allclose(losses, other_losses, rtol=1e-5, atol=1e-5)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, other_state[key], rtol=1e-4, atol=1e-5)
    held = [{key for key in state if "towers.towers" in key} for _, _, state, _ in actual]
    assert held[0] != held[-1] and set().union(*held) == {
        key for key in right[0][2] if "towers.towers" in key
    }
    rows = rows_of(actual)
    other_rows = rows_of(right)
    for table, weights in rows.items():
        np.testing.assert_allclose(weights, other_rows[table], rtol=1e-4, atol=1e-5)


STRIDED = [list(cases.FEATURES[first::2]) for first in range(2)]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_what_crosses_hosts_is_what_towers_give(worlds, ranks_per_host):
    """2 b F (1 - 1/H) 4 D / CR bytes a rank and step, by the counters of traffic, without ids."""
    num_hosts = 4 // ranks_per_host
    batch_size = 128
    dim = 64
    groups = STRIDED if num_hosts == 2 else [["a", "b"], ["c"], ["d", "e"], ["f"]]
    for compression in (1, 2, 4):
        width = None if compression == 1 else dim // compression
        results = worlds(4).run(
            cases.traffic,
            batch_size,
            ranks_per_host,
            exchange="towers",
            ranks_per_host=ranks_per_host,
            groups=groups,
            width=width,
            combined=0,
            dim=dim,
            dense=False,
            placement="table_wise_pooled",
        )
        expected = (
            4 * 2 * batch_size * len(cases.FEATURES) * (1 - 1 / num_hosts) * 4 * dim / compression
        )
        ids = sum(purposes["ids"] for _, purposes, _ in results)
        counted = sum(purposes["embeddings"] + purposes["gradients"] for _, purposes, _ in results)
        assert counted == expected
        assert sum(across for across, *_ in results) - ids == pytest.approx(expected, rel=0.03)
        assert ids < 0.07 * expected


def test_reduced_and_scattered_bags_send_a_vector_a_bag_and_shard(worlds):
    """Inside a tower of two ranks, which serve two each.

    A part of each of the other's bags, and gradients of the own ones.
    """
    batch_size = 64
    dim = 32
    results = worlds(4).run(
        cases.traffic,
        batch_size,
        2,
        exchange="towers",
        ranks_per_host=2,
        groups=STRIDED,
        width=None,
        dim=dim,
        dense=False,
        placement="row_wise_pooled",
    )
    for _, purposes, _ in results:
        assert purposes["inside towers"] == 2 * 2 * batch_size * len(STRIDED[0]) * 4 * dim


def test_dense_bytes_fall_by_those_of_the_tower_modules(worlds):
    """Which belong to one rank each here.

    A reduction sends 2 (W - 1) / W of its bytes, a flag a tensor among them.
    """
    groups = [["a", "b"], ["c"], ["d", "e"], ["f"]]
    sent = {}
    for exchange, more in (("alltoall", {}), ("towers", {"ranks_per_host": 1})):
        for dense in (True, False):
            sent[exchange, dense] = worlds(4).run(
                cases.traffic,
                8,
                exchange=exchange,
                groups=groups,
                dense=dense,
                placement="table_wise",
                **more,
            )
    parameters = sent["alltoall", True][0][2]
    modules = [count for name, count in parameters.items() if "towers.towers" in name]
    for rank in range(4):
        dense = {
            name: sent[name, True][rank][0] - sent[name, False][rank][0]
            for name in ("alltoall", "towers")
        }
        assert dense["alltoall"] - dense["towers"] == 2 * 3 / 4 * 4 * (sum(modules) + len(modules))


def test_one_feature_a_tower_and_more_towers_than_hosts(worlds):
    """Six towers of a feature each on three ranks, and a group of them on each."""
    singles = [[feature] for feature in cases.FEATURES]
    both = [
        worlds(3).run(
            cases.train,
            6,
            "tower_dcn",
            exchange=exchange,
            groups=singles,
            placement="row_wise",
            **more,
        )
        for exchange, more in (("alltoall", {}), ("towers", {"ranks_per_host": 1}))
    ]
    for (right, *_), (actual, _, state, _) in zip(*both, strict=True):
        for own, other in zip(actual, right, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-5)
        assert len({key.split(".")[2] for key in state if key.startswith("towers.towers")}) == 2


SHARED = [pb.Table("item", 9, 4, features=("a", "b")), pb.Table("user", 9, 4, features=("c",))]
WRONG = {
    "groups of other features": (
        {"groups": [["a", "b"], ["z"]], "tables": SHARED},
        "feature 'z' in a tower",
    ),
    "readers of one table apart": (
        {"groups": [["a", "c"], ["b"]], "tables": SHARED},
        "one table 'item'",
    ),
    "a feature in no tower": (
        {"groups": [["a", "b"]], "tables": SHARED},
        "feature 'c' in no tower",
    ),
    "fewer towers than groups of hosts": (
        {"groups": [["a", "b"], ["c"]], "tables": SHARED, "hosts_per_tower": 1},
        "set hosts_per_tower to 2",
    ),
    "hosts without ranks": ({"tables": SHARED, "ranks_per_host": 0}, "ranks_per_host 0"),
    "groups that are not the model's": (
        {"exchange_groups": [["a", "b"], ["c", "d"], ["e", "f"]]},
        "as the model has them",
    ),
    "a plan across towers": (
        {"tables": SHARED, "placement": Plan.of(SHARED, 3)},
        "which have its tower",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_said_on_all_ranks(worlds, what):
    options, text = WRONG[what]
    for message in worlds(3).run(cases.wrong, **options):
        assert message is not None and text in message


def test_a_plan_may_say_where_tables_lie_inside_their_towers(worlds):
    tables = [pb.Table(feature, 30, cases.DIM) for feature in cases.FEATURES]
    own = {
        "a": 0,
        "b": 1,
        "c": 1,
        "d": 0,
        "e": 1,
        "f": 2,
    }  # of groups of ranks 0 and 1, and of rank 2
    placements = {name: Placement(kind="table_wise", shards=(rank,)) for name, rank in own.items()}
    plan = Plan(num_shards=3, placements=placements)
    plan.check(tables)
    results = worlds(3).run(
        cases.train,
        3,
        "tower_dlrm",
        exchange="towers",
        ranks_per_host=2,
        groups=[["a", "b", "c", "d", "e"], ["f"]],
        placement=plan,
    )
    held = {name: rank for rank, (*_, pieces) in enumerate(results) for name, *_ in pieces}
    assert held == own
