"""Workers that die with references.

Owners drop what the dead held, users of the dead hear so, and newcomers start afresh.
"""

import time

import pytest
import reference_cases as cases
import torch
from rpc_team import Team

from pibroch import rpc
from pibroch.rpc.rref import remote

pytestmark = pytest.mark.timeout(180)

LOSS_S = 20.0


@pytest.fixture
def team():
    """Three workers of this test alone."""
    team = Team(3)
    yield team
    team.close()


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return None


def give_away(num_references):
    """Values of this worker that others alone refer to: worker1, or worker2 through it."""
    direct = [rpc.RRef(torch.ones(2)) for _ in range(num_references)]
    rpc.rpc_sync("worker1", cases.keep, ("direct", direct))
    indirect = [rpc.RRef(torch.ones(2)) for _ in range(num_references)]
    rpc.rpc_sync("worker1", cases.pass_and_keep, (indirect, ["worker2"]))
    del direct, indirect
    assert cases.wait_until(lambda: cases.live_counts()["handles"] == 0)
    return cases.live_counts()


def time_until_values(num_values):
    started = time.monotonic()
    assert cases.wait_until(lambda: cases.live_counts()["values"] == num_values)
    return time.monotonic() - started


def read_chain():
    return [rref.to_here().tolist() for rref in cases.kept["chain"]]


def counts_after(num_seconds):
    """Counts, once nothing changes any more."""
    cases.wait_until(lambda: cases.live_counts()["children"] == 0, num_seconds)
    return cases.live_counts()


def test_the_owner_drops_what_a_killed_user_held(team):
    counts = team.run(0, give_away, 20)
    assert counts["values"] == 40
    team.workers[1].kill()
    assert team.run(0, time_until_values, 20) < LOSS_S
    assert team.run(2, read_chain) == [[1.0, 1.0]] * 20  # what the dead had passed on lives
    assert team.run(2, cases.settle) == {}
    assert team.run(0, cases.settle) == {}


def refer_to_worker1():
    reference = remote("worker1", cases.make, (3,))
    assert reference.to_here().tolist() == [3.0] * 3
    cases.kept["theirs"] = reference
    cases.kept["blocked"] = remote("worker1", cases.wait_for_event, ("never", 1))
    rpc.rpc_sync("worker2", cases.keep, ("theirs", reference))


def wait_for_blocked():
    started = time.monotonic()
    return raised(cases.kept["blocked"].to_here), time.monotonic() - started


def use_the_lost():
    reference = cases.kept["theirs"]
    assert cases.wait_until(lambda: not reference.confirmed_by_owner())
    uses = [
        reference.to_here,
        reference.rpc_sync().numel,
        reference.rpc_async().numel,
        reference.remote().numel,
    ]
    errors = [raised(use) for use in uses]
    errors.append(raised(rpc.rpc_sync, "worker0", cases.identity, (reference,)))
    return errors, reference.owner_name()


def start_anew():
    reference = remote("worker1", cases.make, (4,))
    shared = rpc.rpc_sync("worker2", cases.read, (reference,))
    return reference.to_here().tolist(), shared


def test_references_to_a_killed_owner_raise(team):
    team.run(0, refer_to_worker1)
    team.workers[0].start(wait_for_blocked)
    team.workers[1].kill()
    killed = time.monotonic()
    error, _ = team.workers[0].result()
    assert error == "ReferenceLostError"
    assert time.monotonic() - killed < LOSS_S
    assert team.run(0, use_the_lost) == (["ReferenceLostError"] * 5, "worker1")
    assert team.run(2, use_the_lost)[0] == ["ReferenceLostError"] * 5
    team.replace(1)
    assert team.run(0, use_the_lost)[0] == ["ReferenceLostError"] * 5  # not those of the newcomer
    assert team.run(0, start_anew) == ([4.0] * 3, ([4.0] * 3, False, False))
    assert team.run_all(cases.settle) == [{}] * 3


def pass_on_to_the_dead(rounds):
    """Send references to a worker that is gone: what was kept for it is let go again."""
    own_reference = rpc.RRef(1)
    reference = remote("worker2", cases.make, (1,))
    for _ in range(rounds):
        error = raised(rpc.rpc_sync, "worker1", cases.identity, ([own_reference, reference],))
        assert error == "WorkerLostError", error
    created = [remote("worker1", cases.make, (1,)) for _ in range(rounds)]
    assert {raised(each.to_here) for each in created} == {"ReferenceLostError"}
    future = (
        rpc.rpc_async("worker2", cases.read, (created[0],))
        if created[0].confirmed_by_owner()
        else None
    )
    assert future is None


def test_nothing_is_kept_for_messages_that_cannot_arrive(team):
    team.run(0, give_away, 1)  # so all are connected
    team.workers[1].kill()
    team.run(0, pass_on_to_the_dead, 3)
    assert team.run(2, cases.settle) == {}
    assert team.run(0, cases.settle) == {}


def leave_with_references():
    cases.kept["mine"] = rpc.RRef(torch.ones(2))
    cases.kept["theirs"] = remote("worker1", cases.make, (1,))
    cases.kept["theirs"].to_here()


def after_shutdown():
    rpc.shutdown()
    own_reference = cases.kept["mine"]
    reference = cases.kept["theirs"]
    errors = [
        raised(own_reference.to_here),
        raised(own_reference.local_value),
        raised(reference.to_here),
        raised(reference.rpc_sync().numel),
    ]
    errors += [raised(rpc.RRef, 1), raised(remote, "worker1", cases.make, (1,))]
    assert repr(own_reference) and reference.owner_name() == "worker1"
    return errors


def test_references_end_with_the_group(team):
    team.run_all(leave_with_references)
    assert team.run_all(after_shutdown) == [["RuntimeError"] * 6] * 3
