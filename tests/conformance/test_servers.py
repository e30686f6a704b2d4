"""With its rows on servers, the lookahead exchange gives the bits of ``alltoall``.

Embedding servers are other processes.
"""

import numpy as np
import pytest
import role_team as on_servers
from test_lookahead import SIZES, check_same, stream_bits
from test_world import KIND_OF, bits, whole_records

import cases
from cases import OPTIMIZERS, SHAPES


@pytest.fixture
def run(worlds, server_team):
    """``run(ranks, servers, function, ...)`` as a world's ``run``, with the rows on servers."""

    def run_on(size, num_servers, function, *args, **options):
        world = worlds(size)
        return world.run(
            on_servers.run, server_team.rendezvous, num_servers, function.__name__, *args, **options
        )

    return run_on


CACHES = ["lrpp", "partitioned", "replicated"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_same_bits_for_every_optimizer(worlds, run, size, cache):
    """Each optimizer at each size, and with each cache.

    Of the lookaheads and numbers of servers some each.
    """
    for number, name in enumerate(OPTIMIZERS):
        if (number + size + CACHES.index(cache)) % 2:
            continue
        lookahead = (1, 2, 7, 200)[(size + number) % 4]
        num_servers = 1 + (size + number) % 3
        results = run(
            size, num_servers, cases.run_stream, name, SIZES, lookahead=lookahead, cache=cache
        )
        check_same(results, stream_bits(worlds(size), name), name)


@pytest.mark.parametrize("shape", ["any", "narrow"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_same_bits_for_tables_of_any_kind(worlds, run, size, shape):
    for name in ("row_wise_adagrad", "adam"):
        at = {"look_at": (3,), "forget_at": (7,)} if shape == "narrow" else {}
        results = run(
            size, size, cases.run_stream, name, SIZES, lookahead=3, cache_rows=60, shape=shape, **at
        )
        check_same(results, stream_bits(worlds(size), name, shape=shape, **at), name, shape)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_same_bits_with_a_cache_barely_large_enough(worlds, run, size, delayed):
    barely = cases.rows_of_largest_part(size, SIZES)
    for lookahead, spare in ((1, 0), (7, 0), (7, 3)):
        options = {"lookahead": lookahead, "cache_rows": barely + spare, "delayed_sync": delayed}
        results = run(size, 2, cases.run_stream, "adam", SIZES, **options)
        check_same(results, stream_bits(worlds(size), "adam"), "adam")


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_with_lookups_between_a_lookup_and_its_update(worlds, run, shape):
    for (name, placement), size in zip(
        (("row_wise_adagrad", "row_wise"), ("adam", "table_wise"), ("sgd", "row_wise")),
        (2, 2, 3),
        strict=True,
    ):
        results = run(
            size, 2, cases.run_steps, name, shape, KIND_OF[name], lookahead=3, placement=placement
        )
        check_same(results, bits(worlds(size), name, shape), name, shape)


def test_pieces_can_be_looked_at_and_written_between_steps(worlds, run):
    for at in ({"look_at": (0, 3, 4, 9)}, {"forget_at": (2, 10)}):
        results = run(2, 3, cases.run_stream, "adagrad", SIZES, lookahead=4, **at)
        check_same(results, stream_bits(worlds(2), "adagrad", **at), "adagrad")
    results = run(
        2, 2, cases.run_stream_in_small_rounds, "adagrad", SIZES, lookahead=4, look_at=(0, 3, 4, 9)
    )
    check_same(results, stream_bits(worlds(2), "adagrad", look_at=(0, 3, 4, 9)), "adagrad")


@pytest.mark.parametrize(
    "function",
    [
        cases.stop_early_and_feed_again,
        cases.feed_two_at_once,
        cases.lookup_twice_then_update_twice,
        cases.look_up_averages,
    ],
)
def test_programs_that_leave_the_order_of_the_feed(worlds, run, function):
    expected = worlds(2).run(function)
    for right, actual in zip(expected, run(2, 2, function, lookahead=3), strict=True):
        np.testing.assert_equal(actual, right)


def test_averages_of_rows_of_16_bits(worlds, run):
    for right, actual in zip(
        worlds(2).run(cases.look_up_averages, dtype="bfloat16"),
        run(2, 2, cases.look_up_averages, dtype="bfloat16", lookahead=3),
        strict=True,
    ):
        np.testing.assert_equal(actual, right)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_narrow_wire_gives_the_bits_of_alltoall_with_it(worlds, run, wire):
    results = worlds(2).run(cases.run_stream, "adam", SIZES, wire=wire)
    expected = results, whole_records(results, SHAPES["odd_dims"], OPTIMIZERS["adam"])
    for cache in ("lrpp", "partitioned"):
        own = run(2, 2, cases.run_stream, "adam", SIZES, wire=wire, lookahead=4, cache=cache)
        check_same(own, expected, "adam")
    name = "sgd"
    shape = "shared"
    results = worlds(2).run(cases.run_steps, name, shape, KIND_OF[name], wire=wire)
    own = run(2, 2, cases.run_steps, name, shape, KIND_OF[name], wire=wire, lookahead=3)
    check_same(
        own,
        (results, whole_records(results, SHAPES[shape], cases.optimizers(name, shape))),
        name,
        shape,
    )


def test_a_rank_that_runs_out_of_batches_gets_empty_ones(worlds, run):
    for num_batches in ([3, 1, 0], [0, 0, 2], [0, 0, 0]):
        expected = worlds(3).run(cases.run_out_of_batches, num_batches)
        np.testing.assert_equal(run(3, 3, cases.run_out_of_batches, num_batches), expected)


def test_a_bad_batch_is_named_on_every_rank_and_left_out(worlds, run):
    for rank, (message, unchanged, goes_on) in enumerate(run(3, 3, cases.meet_a_bad_batch, 1)):
        assert message[0] == ("RowIdError" if rank == 1 else "DataError")
        assert unchanged and goes_on
    expected = worlds(3).run(cases.meet_a_bad_batch_in_the_feed, 2)
    np.testing.assert_equal(run(3, 3, cases.meet_a_bad_batch_in_the_feed, 2, lookahead=2), expected)


def test_a_batch_that_fits_into_no_cache_ends_the_run_before_it_is_trained(run):
    for size in (1, 2):
        for message, step in run(size, 2, cases.overfill):
            assert (
                "rows, and a cache of 12; need room for the rows of one batch; do: raise cache_rows"
                in message
            )
            assert step < 5


def test_trainers_that_want_different_things_are_refused(run):
    message = run(2, 1, cases.refuse_other_tables)
    assert [text for text in message if text is not None]
    assert all("other tables, optimizer or seed" in text for text in message if text is not None)


def test_servers_run_nothing_but_what_they_serve(run):
    """Whoever knows the job's secret cannot, say, write files there."""
    for message in run(1, 1, cases.name_what_servers_do_not_serve):
        assert len(message) == 2 and all(
            "of a module that is not allowed here" in text for text in message
        )
