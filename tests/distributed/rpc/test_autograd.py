import time

import autograd_cases as cases
import autograd_programs as programs
import pytest

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_random_graphs_equal_local_autograd(workers, num_workers):
    team = workers(num_workers)
    team.run_all(cases.count_messages)
    expected = 0
    counted = sum(team.run_all(cases.num_messages))
    for seed in range(100):
        expected += team.run(0, programs.check, 1000 * num_workers + seed, num_workers)
    # each gradient message once, and no other
    assert sum(team.run_all(cases.num_messages)) - counted == expected > 100
    gone(team)


def test_several_contexts_at_once(workers):
    """Each worker runs several graphs at once, all on the same leaves."""
    team = workers(3)
    team.run_all(cases.many_at_once, 6, 3)
    gone(team)


@pytest.mark.parametrize(
    "case",
    [
        cases.several_roots,
        cases.no_remote_part,
        cases.calls_itself,
        cases.ping_pong,
        cases.residual_over_workers,
        cases.parameters_sent,
        cases.same_tensor_twice,
        cases.mixed_values,
        cases.complex_numbers,
        cases.in_place_work,
        cases.views_and_strides,
        cases.second_pass_retained,
        cases.second_pass_not_retained,
        cases.passes_one_after_another,
        cases.unused_branches_do_not_run,
        cases.undefined_gradients,
        cases.graphs_are_freed,
        cases.hooks_run_once,
        cases.retained_gradients,
        cases.many_micro_batches,
        cases.embedding_rows,
        cases.no_grad_is_respected,
        cases.gradient_is_ours,
        cases.leaves_keep_their_own_gradients,
        cases.wrong_use,
        cases.local_backward_is_refused,
        cases.context_follows_the_calls,
        cases.chained_references,
    ],
    ids=lambda case: case.__name__,
)
def test_case(workers, case):
    team = workers(3)
    team.run(0, case)
    gone(team)


def test_deep_diamond_is_linear(workers):
    """2^20 paths; each node and message once."""
    team = workers(2)
    team.run_all(cases.count_messages)
    counted = sum(team.run_all(cases.num_messages))
    begin = time.monotonic()
    num_steps = team.run(0, cases.diamond, 20)
    assert time.monotonic() - begin < 60
    assert num_steps == 20
    assert sum(team.run_all(cases.num_messages)) - counted == 2 * 2 * 20
    gone(team)


def gone(team):
    """Nothing is left of any context; releases travel on after the block has ended."""
    deadline = time.monotonic() + 60
    while (counts := team.run_all(cases.live_counts)) and any(
        any(each.values()) for each in counts
    ):
        assert time.monotonic() < deadline, counts
