"""Under a central oracle, the lookahead exchange gives the bits of ``alltoall``.

With embedding servers and without.
"""

import numpy as np
import pytest
import role_team as on_servers
from test_lookahead import SIZES, check_same, stream_bits
from test_world import KIND_OF, bits

import cases
from cases import OPTIMIZERS


@pytest.fixture
def run(worlds, oracle_team):
    """``run(ranks, servers, function, ...)`` as a world's ``run``, with a central oracle."""

    def run_on(size, num_servers, function, *args, **options):
        call = (oracle_team.rendezvous, num_servers, function.__name__, *args)
        return worlds(size).run(on_servers.run, *call, central=True, **options)

    return run_on


@pytest.mark.parametrize("size", [1, 2, 4])
def test_same_bits_for_every_optimizer(worlds, run, size):
    for number, name in enumerate(OPTIMIZERS):
        lookahead = (1, 7, 200)[(size + number) % 3]
        num_servers = 2 * (number % 2)
        cache = ("lrpp", "partitioned", "replicated")[(number // 2 + size) % 3]
        results = run(
            size, num_servers, cases.run_stream, name, SIZES, lookahead=lookahead, cache=cache
        )
        check_same(results, stream_bits(worlds(size), name), name)


@pytest.mark.parametrize("size", [2, 4])
def test_same_bits_with_a_cache_barely_large_enough(worlds, run, size):
    barely = cases.rows_of_largest_part(size, SIZES)
    for lookahead, spare, delayed, num_servers in (
        (1, 0, True, 0),
        (7, 3, False, 2),
        (200, 0, True, 0),
    ):
        options = {"lookahead": lookahead, "cache_rows": barely + spare, "delayed_sync": delayed}
        results = run(size, num_servers, cases.run_stream, "adam", SIZES, **options)
        check_same(results, stream_bits(worlds(size), "adam"), "adam")


def test_same_bits_with_lookups_between_a_lookup_and_its_update(worlds, run):
    for name, shape, num_servers in (
        ("row_wise_adagrad", "shared", 0),
        ("adam", "any", 0),
        ("adam", "any", 2),
    ):
        results = run(2, num_servers, cases.run_steps, name, shape, KIND_OF[name], lookahead=3)
        check_same(results, bits(worlds(2), name, shape), name, shape)


def test_pieces_can_be_looked_at_and_written_between_steps(worlds, run):
    for at in ({"look_at": (0, 3, 4, 9)}, {"forget_at": (2, 10)}):
        results = run(2, 0, cases.run_stream, "adagrad", SIZES, lookahead=4, **at)
        check_same(results, stream_bits(worlds(2), "adagrad", **at), "adagrad")


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
    for right, actual in zip(expected, run(2, 0, function, lookahead=3), strict=True):
        np.testing.assert_equal(actual, right)


def test_a_rank_that_runs_out_of_batches_gets_empty_ones(worlds, run):
    for num_batches in ([3, 1], [0, 2], [0, 0]):
        expected = worlds(2).run(cases.run_out_of_batches, num_batches)
        np.testing.assert_equal(run(2, 0, cases.run_out_of_batches, num_batches), expected)


def test_a_bad_batch_is_named_on_every_rank_and_left_out(worlds, run):
    expected = worlds(2).run(cases.meet_a_bad_batch_in_the_feed, 1)
    np.testing.assert_equal(run(2, 0, cases.meet_a_bad_batch_in_the_feed, 1, lookahead=2), expected)


def test_a_batch_that_fits_into_no_cache_ends_the_run_before_it_is_trained(run):
    for num_servers in (0, 2):
        for message, step in run(2, num_servers, cases.overfill):
            assert (
                "rows, and a cache of 12; need room for the rows of one batch; do: raise cache_rows"
                in message
            )
            assert step < 5


def test_ranks_that_want_different_things_are_refused(worlds, run):
    for message in (
        run(2, 0, cases.refuse_other_options),
        worlds(2).run(cases.refuse_other_options),
    ):
        assert sorted(text for text in message) == [
            "got lookahead 3 on rank 0, 4 on rank 1; need the same options on all ranks",
            "got lookahead 4 on rank 1, 3 on rank 0; need the same options on all ranks",
        ]


def test_ranks_tell_rows_to_the_oracle_alone(run, worlds):
    """Each rank sends its rows once, in place of once to every other one; it gets plans."""
    central = run(4, 0, cases.count_bytes)
    replicated = worlds(4).run(cases.count_bytes)
    for one, other in zip(central, replicated, strict=True):
        assert (
            0 < 3 * one["ids"] <= other["ids"] < 4 * 3 * one["ids"]
        )  # to three ranks, in messages with room to spare
        assert one["plans"] > 0 and "plans" not in other
        assert {name: one[name] for name in other if name != "ids"} == {
            name: other[name] for name in other if name != "ids"
        }


def test_an_oracle_runs_nothing_but_what_it_serves(run):
    for message in run(1, 0, cases.name_what_an_oracle_does_not_serve):
        assert len(message) == 2 and all(
            "of a module that is not allowed here" in text for text in message
        )
