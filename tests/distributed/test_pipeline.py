"""Lag-tolerant inference on real ranks, beside synchronous inference."""

from importlib.util import find_spec

import pipeline_cases as cases
import pytest

NEEDS_MPI = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
OVER = [
    (3, "auto"),
    (4, "auto"),
    (3, "stream"),
    pytest.param(3, "mpi", marks=[NEEDS_MPI, pytest.mark.alone]),
]


@pytest.mark.parametrize("placement", [*sorted(cases.PLACEMENTS), "rows"])
def test_predictions_have_the_bits_of_synchronous_inference_for_every_placement(worlds, placement):
    for result in worlds(2).run(cases.predictions, placement, (0, 1, 3, 8), "auto"):
        assert result == [(True, 2.0)] * 4


@pytest.mark.parametrize(("size", "transport"), OVER)
def test_and_over_every_transport(worlds, size, transport):
    for result in worlds(size).run(cases.predictions, "mixed", (0, 2), transport):
        assert result == [(True, 2.0)] * 2


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_and_for_tables_of_several_dims_on_a_narrow_wire(worlds, wire):
    for result in worlds(2).run(
        cases.predictions, "mixed", (0, 3), "auto", (8, 4, 12, 8), wire=wire
    ):
        assert result == [(True, 2.0)] * 2


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_ranks_may_have_any_number_of_batches(worlds, bound):
    assert worlds(3).run(cases.unequal, bound) == [True] * 3


@pytest.mark.parametrize("bound", [0, 3])
def test_a_bad_batch_fails_alone(worlds, bound):
    first, second = worlds(2).run(cases.bad_batches, bound)
    assert second == {}
    assert (
        sorted(first) == [3, 5]
        and "RowIdError" in first[3]
        and "1000000" in first[3]
        and "dense" in first[5]
    )


def test_other_exchanges_and_bounds_are_refused(worlds):
    exchange, bound = worlds(2).run(cases.refused)[0]
    assert "alltoall" in exchange and "'many'" in bound


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_always_slow_is_named_by_all_and_gets_no_larger_bound(worlds, size):
    for bound, straggler, messages, is_right in worlds(size).run(cases.steps, 1, 0.0):
        assert bound == 1 and messages == 2 and is_right
        assert straggler.rank == 1 and straggler.seconds > 0.01 > straggler.next_seconds


def test_a_bound_is_chosen_from_jitter_the_same_on_all_ranks(worlds):
    result = worlds(3).run(cases.steps, None, 0.01)
    assert len({bound for bound, *_ in result}) == 1 and result[0][0] > 1
    assert [each[1:] for each in result] == [(None, 2, True)] * 3


def test_ranks_end_together_whenever_they_choose(worlds):
    result = worlds(3).run(cases.chosen_in_runs)
    assert [counts for counts, _ in result] == [[79 + rank, 3 * rank, 20] for rank in range(3)]
    assert len({bound for _, bound in result}) == 1
