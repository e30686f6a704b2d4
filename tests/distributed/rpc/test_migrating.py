"""Code that comes from torch.

Names, types of errors, layouts, modules and gradients that it relies on.
"""

import contextlib

import migrating_cases as cases
import pytest
from rpc_team import Team, Worker, join

from pibroch import rpc
from pibroch.errors import ConfigError
from pibroch.ports import free_port


@pytest.mark.parametrize(
    "case",
    [
        cases.underscores,
        cases.sparse_leaves,
        cases.sparse_that_is_not_coalesced,
        cases.sparse_outside_of_a_context,
        cases.sparse_gradients_have_memory_of_their_own,
        cases.hooks_where_gradients_accumulate,
        cases.backward_raises_runtime_errors,
        cases.absent_methods,
        cases.callee_logs,
        cases.first_error_ends_the_wait,
        cases.remote_to_oneself_has_a_timeout,
        cases.default_timeout,
        cases.layouts,
        cases.remote_modules,
        cases.events,
    ],
    ids=lambda case: case.__name__,
)
def test_what_code_from_torch_expects(workers, case):
    workers(3).run(0, case)


def call_without_names():
    counter = cases.Counter(4)
    assert rpc.rpc_sync("worker1", counter._up, (2,)) == 6 and counter.count == 4
    assert rpc.rpc_async("worker1", counter._up, (2,)).wait() == 6
    assert rpc.remote("worker1", counter._up, (2,)).to_here() == 6
    return True


def test_what_has_no_name_travels_as_a_pickle_where_pickles_are_allowed(workers):
    with contextlib.closing(Team(2, allow_pickle=True)) as team:
        assert team.run(0, call_without_names)
    with pytest.raises(AssertionError, match="NotAllowedError"):
        workers(2).run(0, call_without_names)


def refused(*join_arguments):
    """The error of a worker that may not join."""
    try:
        join(*join_arguments)
    except (RuntimeError, ConfigError) as error:
        return isinstance(error, RuntimeError) and isinstance(error, ConfigError), str(error)


def test_a_worker_of_another_kind_of_group_or_with_a_name_that_is_taken_is_refused():
    with contextlib.ExitStack() as stack:
        team = stack.enter_context(contextlib.closing(Team(1)))
        stranger = Worker()
        stack.callback(stranger.close)
        is_both, text = stranger.run(refused, "other", 5, None, team.port, {})
        assert is_both and "RPC group mixes statically and dynamically initialized members" in text
    with contextlib.ExitStack() as stack:
        port = free_port()
        members = [Worker(), Worker(), Worker()]
        for each in members:
            stack.callback(each.close)
        members[0].run(join, "worker0", 0, None, port, {})
        is_both, text = members[1].run(refused, "worker1", 1, 2, port, {})
        assert is_both and "RPC group mixes" in text
        is_both, text = members[1].run(refused, "worker0", 1, None, port, {})
        assert is_both and "is not unique" in text
        members[2].run(join, "worker1", 1, None, port, {})
