"""Plans that give each row a home of its own, and copies to some.

The bits of row-wise placement, whatever the plan.
"""

import numpy as np
import pytest
import role_team as on_servers
import torch
from exchanges import options_of
from test_lookahead import SIZES, check_same, stream_bits
from test_world import KIND_OF, bits, whole_records

import cases
from cases import OPTIMIZERS, SHAPES, run_steps
from grids import some
from row_plans import random_plan


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_alltoall_with_copies_gives_the_bits_of_row_wise_placement(worlds, size, shape):
    number = size + [*SHAPES].index(shape)
    for seed, name in some(enumerate(OPTIMIZERS), number, 2):
        first, records = bits(worlds(size), name, shape)
        plan = random_plan(SHAPES[shape], size, seed, copies=size > 1)
        replicas = ("gather", "sparse", "dense")[(seed + size) % 3]
        results = worlds(size).run(
            run_steps, name, shape, KIND_OF[name], placement=plan, replicas=replicas
        )
        optimizer = cases.optimizers(name, shape)
        assert np.array_equal(whole_records(results, SHAPES[shape], optimizer), records), name
        for (actual, _), (other, _) in zip(results, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True)), name


@pytest.mark.parametrize("replicas", ["sparse", "dense"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("placement", ["replicated", "mixed"])
def test_sums_of_whole_copied_tables_have_the_same_bits(worlds, size, placement, replicas):
    for shape in ("odd_dims", "any"):
        for name in ("adagrad", "row_wise_adam"):
            options = options_of("alltoall", placement, SHAPES[shape])
            expected = worlds(size).run(run_steps, name, shape, KIND_OF[name], **options)
            records = whole_records(expected, SHAPES[shape], cases.optimizers(name, shape))
            results = worlds(size).run(
                run_steps, name, shape, KIND_OF[name], replicas=replicas, **options
            )
            assert np.array_equal(
                whole_records(results, SHAPES[shape], cases.optimizers(name, shape)), records
            )
            for (actual, _), (other, _) in zip(results, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


@pytest.mark.parametrize("cache", ["lrpp", "partitioned", "replicated"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lookahead_gives_them_too(worlds, size, cache):
    for number, name in some(enumerate(OPTIMIZERS), size + len(cache), 2):
        plan = random_plan(SHAPES["odd_dims"], size, 10 * number + size, copies=False)
        options = {"lookahead": (1, 7, 200)[(number + size) % 3], "cache": cache, "placement": plan}
        results = worlds(size).run(cases.run_stream, name, SIZES, exchange="lookahead", **options)
        check_same(results, stream_bits(worlds(size), name), name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_and_so_it_does_with_the_rows_on_servers(worlds, server_team, size):
    for number, name in enumerate(OPTIMIZERS):
        num_servers = 1 + (number + size) % 3
        plan = random_plan(SHAPES["odd_dims"], num_servers, number, copies=False)
        results = worlds(size).run(
            on_servers.run,
            server_team.rendezvous,
            num_servers,
            "run_stream",
            name,
            SIZES,
            lookahead=(1, 7, 200)[number % 3],
            placement=plan,
        )
        check_same(results, stream_bits(worlds(size), name), name)


def test_tables_move_whole_and_from_outside(worlds):
    for size in (2, 3):
        plan = random_plan(SHAPES["odd_dims"], size, 3, copies=True)
        assert (
            worlds(size).run(cases.load_a_state_dict, exchange="alltoall", placement=plan)
            == [([False] * 3 + [True] * 3, True)] * size
        )
        plan = random_plan(SHAPES["any"], size, 4, copies=True)
        right = worlds(size).run(cases.load_from_outside)
        records = whole_records(right, SHAPES["any"], cases.optimizers("adam", "any"))
        results = worlds(size).run(cases.load_from_outside, placement=plan)
        assert np.array_equal(
            whole_records(results, SHAPES["any"], cases.optimizers("adam", "any")), records
        )
        assert_gathered_and_spread(
            worlds(size), random_plan(SHAPES["odd_dims"], size, 5, copies=True)
        )


def assert_gathered_and_spread(world, plan):
    """Whole tables are gathered from rows anywhere as from evenly spaced ones, and back."""
    (first, *nothing), (again, *_) = (
        world.run(cases.gather_and_spread, placement=placement) for placement in ("row_wise", plan)
    )
    assert not any(nothing)
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
