"""The lookahead exchange gives the bits of ``alltoall``.

Whatever its cache, its lookahead and the program around it.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch
from test_world import KIND_OF, bits, whole_records

import cases
from cases import OPTIMIZERS, SHAPES, run_steps, run_stream
from grids import some

SIZES = [9, 4, 12, 0, 1, 30, 2, 8, 5, 0, 0, 6]
LARGE = 10**6


@lru_cache
def stream_bits(world, name, look_at=(), forget_at=(), shape="odd_dims"):
    results = world.run(run_stream, name, SIZES, look_at=look_at, forget_at=forget_at, shape=shape)
    return results, whole_records(results, SHAPES[shape], cases.optimizers(name, shape))


def check_same(results, first, name, shape="odd_dims"):
    """Equal pooled embeddings on all ranks in all steps, and equal records."""
    reference, records = first
    assert np.array_equal(
        whole_records(results, SHAPES[shape], cases.optimizers(name, shape)), records
    )
    for (actual, _), (other, _) in zip(results, reference, strict=True):
        assert len(actual) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


CACHES = ["lrpp", "partitioned", "replicated"]
LOOKAHEADS = [1, 2, 7, 200]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_same_bits_for_every_optimizer(worlds, size, lookahead, cache):
    number = size + LOOKAHEADS.index(lookahead) + CACHES.index(cache)
    for name in some(OPTIMIZERS, number, 3):
        results = worlds(size).run(
            run_stream, name, SIZES, exchange="lookahead", lookahead=lookahead, cache=cache
        )
        check_same(results, stream_bits(worlds(size), name), name)


@pytest.mark.parametrize("cache", ["lrpp", "partitioned", "replicated"])
@pytest.mark.parametrize(("size", "lookahead"), [(1, 2), (2, 1), (2, 200), (3, 7), (4, 3)])
def test_same_bits_for_tables_of_any_kind_in_one_window(worlds, size, lookahead, cache):
    for number, name in enumerate(("row_wise_adagrad", "adam")):
        options = {
            "lookahead": lookahead,
            "cache": cache,
            "placement": ("row_wise", "table_wise")[number],
        }
        how = (
            {"wire": "bfloat16", "compress": True} if size == 3 else {"delayed_sync": bool(number)}
        )
        if cache != "replicated":
            how["cache_rows"] = 60  # so few that some lanes are tight and others are not
        wire = {key: value for key, value in how.items() if key in ("wire", "compress")}
        expected = worlds(size).run(run_stream, name, SIZES, shape="any", **wire)
        records = whole_records(expected, SHAPES["any"], cases.optimizers(name, "any"))
        results = worlds(size).run(
            run_stream, name, SIZES, exchange="lookahead", shape="any", **options, **how
        )
        check_same(results, (expected, records), name, "any")


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("size", "cache"), [(2, "lrpp"), (3, "partitioned"), (4, "replicated")])
def test_same_bits_for_rows_of_16_bits(worlds, size, cache, wire):
    for number, name in enumerate(("row_wise_adagrad", "adam")):
        how = {"wire": wire, "compress": bool(number)}
        expected = worlds(size).run(run_stream, name, SIZES, look_at=(5,), shape="narrow", **how)
        records = whole_records(expected, SHAPES["narrow"], cases.optimizers(name, "narrow"))
        options = {
            "lookahead": 2 + number,
            "cache": cache,
            "placement": ("row_wise", "table_wise")[number],
        }
        if cache != "replicated":
            options["cache_rows"] = 40
        run = worlds(size).run
        results = run(
            run_stream,
            name,
            SIZES,
            look_at=(5,),
            exchange="lookahead",
            shape="narrow",
            **options,
            **how,
        )
        check_same(results, (expected, records), name, "narrow")


@pytest.mark.parametrize("cache", ["lrpp", "partitioned", "replicated"])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_narrow_wire_rounds_as_alltoalls_does(worlds, size, wire, cache):
    """Rows that stay where they are read are rounded like those that travel: the same bits."""
    for name in ("adagrad", "adam"):
        reference = worlds(size).run(run_stream, name, SIZES, look_at=(5,), wire=wire)
        results = worlds(size).run(
            run_stream,
            name,
            SIZES,
            look_at=(5,),
            exchange="lookahead",
            lookahead=4,
            cache=cache,
            wire=wire,
        )
        records = whole_records(reference, SHAPES["odd_dims"], OPTIMIZERS[name])
        check_same(results, (reference, records), name)
        assert not np.array_equal(records, stream_bits(worlds(size), name, (5,))[1])


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("lookahead", [1, 2, 7, 200])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_same_bits_with_a_cache_barely_large_enough(worlds, size, lookahead, delayed):
    barely = cases.rows_of_largest_part(size, SIZES)
    for name, spare in (("row_wise_adagrad", 0), ("adam", 3)):
        results = worlds(size).run(
            run_stream,
            name,
            SIZES,
            exchange="lookahead",
            lookahead=lookahead,
            cache_rows=barely + spare,
            delayed_sync=delayed,
        )
        check_same(results, stream_bits(worlds(size), name), name)


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_with_lookups_between_a_lookup_and_its_update(worlds, shape):
    for number, name in enumerate(OPTIMIZERS):
        placement = ("row_wise", "table_wise")[number % 2]
        results = worlds(3).run(
            run_steps,
            name,
            shape,
            KIND_OF[name],
            exchange="lookahead",
            lookahead=3,
            placement=placement,
        )
        check_same(results, bits(worlds(3), name, shape), name, shape)


def test_pieces_can_be_looked_at_and_written_between_steps(worlds):
    for at in ({"look_at": (0, 3, 4, 9)}, {"forget_at": (2, 10)}):
        results = worlds(3).run(
            run_stream, "adagrad", SIZES, exchange="lookahead", lookahead=4, **at
        )
        check_same(results, stream_bits(worlds(3), "adagrad", **at), "adagrad")


@pytest.mark.parametrize("lookahead", [1, 3, 50])
def test_programs_that_leave_the_order_of_the_feed(worlds, lookahead):
    for function in (
        cases.stop_early_and_feed_again,
        cases.feed_two_at_once,
        cases.lookup_twice_then_update_twice,
    ):
        options = (
            {} if function is cases.lookup_twice_then_update_twice else {"lookahead": lookahead}
        )
        expected = worlds(2).run(function)
        actual = worlds(2).run(function, exchange="lookahead", **options)
        for right, own in zip(expected, actual, strict=True):
            np.testing.assert_equal(own, right)


def test_a_batch_is_announced_in_one_message_unless_it_is_much_larger_than_the_one_before(worlds):
    num_rows = [
        (9, 0, 5),
        (9, 0, 5),
        (0, 1, 0),
        (0, 0, 0),
        (0, 0, 0),
        (5000, 3, 5000),
        (5000, 3, 5000),
        (10, 4000, 9),
    ]
    for is_right, messages in worlds(3).run(cases.announce, num_rows):
        assert is_right
        assert messages == [2, 1, 2, 1, 1, 2, 1, 2]


@pytest.mark.parametrize("lookahead", [1, 2, 5])
def test_a_rank_may_run_out_long_after_the_window_is_full(worlds, lookahead):
    for num_batches in ([12, 9, 10], [8, 12, 12], [12, 1, 11]):
        expected = worlds(3).run(cases.run_out_of_batches, num_batches)
        actual = worlds(3).run(
            cases.run_out_of_batches, num_batches, exchange="lookahead", lookahead=lookahead
        )
        np.testing.assert_equal(actual, expected)


@pytest.mark.parametrize("lookahead", [1, 2, 9])
def test_a_bad_batch_is_named_on_every_rank_and_left_out(worlds, lookahead):
    for bad_rank in range(3):
        expected = worlds(3).run(cases.meet_a_bad_batch_in_the_feed, bad_rank)
        actual = worlds(3).run(
            cases.meet_a_bad_batch_in_the_feed, bad_rank, exchange="lookahead", lookahead=lookahead
        )
        np.testing.assert_equal(actual, expected)
        assert [len(message) for message, _ in actual] == [1, 1, 1]


def test_a_batch_that_fits_into_no_cache_ends_the_run_before_it_is_trained(worlds):
    for message, step in worlds(2).run(cases.overfill):
        assert (
            "rows, and a cache of 12; need room for the rows of one batch; do: raise cache_rows"
            in message
        )
        assert step < 5


@pytest.mark.parametrize("small_first", [0, 12])
def test_large_batches_are_read_ahead_as_far_as_their_bytes_allow(worlds, small_first):
    """One rank's batches are large, from the first one on or later.

    All ranks read less far, alike, with the same bits.
    """
    sizes = [3] * small_first + [400] * 20
    expected = worlds(3).run(cases.read_ahead, sizes, 1)
    actual = worlds(3).run(cases.read_ahead, sizes, 1, exchange="lookahead", lookahead=10)
    free = worlds(3).run(cases.read_ahead, sizes, 1 << 40, exchange="lookahead", lookahead=10)
    for (ahead, pieces), (far, _), (_, others) in zip(actual, free, expected, strict=True):
        np.testing.assert_equal(pieces, others)
        assert max(far) >= 12 and max(ahead[small_first:]) <= 5, (far, ahead)
    assert len({tuple(ahead) for ahead, _ in actual}) == 1
