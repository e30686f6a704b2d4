"""References over real processes: every pair of owner and user, caller and callee.

Nested, shared, failing, dropped.
"""

import copy
import pickle
import time

import pytest
import reference_cases as cases
import torch

from pibroch import rpc
from pibroch.errors import NotAllowedError, ReferenceLostError, RpcTimeoutError
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.rref import RRef, remote

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def team(workers):
    """Four workers, which must refer to nothing when the test is over."""
    team = workers(4)
    yield team
    assert team.run_all(cases.settle) == [{}] * 4


# Who sends which kind of reference to whom


def owner_calls_user():
    own_reference = cases.make_reference(7)
    assert (
        own_reference.is_owner()
        and own_reference.confirmed_by_owner()
        and own_reference.owner_name() == "worker0"
    )
    assert rpc.rpc_sync("worker1", cases.read, (own_reference,)) == ([7.0] * 3, False, False)
    return own_reference.to_here() is own_reference.local_value() is cases.kept["made"]


def user_calls_owner():
    reference = remote("worker1", cases.make, (8,))
    assert not reference.is_owner() and reference.owner() == rpc.get_worker_info("worker1")
    assert rpc.rpc_sync("worker1", cases.read, (reference,)) == ([8.0] * 3, True, True)
    # the owner has the value, and its answer came before that of the call
    assert reference.confirmed_by_owner()
    return reference.to_here().tolist() == [8.0] * 3


def user_calls_user():
    reference = remote("worker1", cases.make, (9,))
    return rpc.rpc_sync("worker2", cases.read, (reference,)) == ([9.0] * 3, False, False)


def owner_answers_user():
    reference = rpc.rpc_sync("worker1", cases.make_reference, (10,))
    assert not reference.is_owner() and reference.confirmed_by_owner()
    return reference.to_here().tolist() == [10.0] * 3


def user_answers_user():
    reference = rpc.rpc_sync("worker1", cases.reference_on, ("worker2", 11))
    assert reference.owner_name() == "worker2"
    return reference.to_here().tolist() == [11.0] * 3


def user_answers_owner():
    own_reference = cases.make_reference(12)
    back = rpc.rpc_sync("worker1", cases.identity, (own_reference,))
    assert (
        back is not own_reference
        and back.is_owner()
        and back.local_value() is own_reference.local_value()
    )
    again = rpc.rpc_sync("worker1", cases.reference_on, ("worker0", 13))
    return again.is_owner() and again.local_value() is cases.kept["made"]


def worker_calls_itself():
    own_reference = remote("worker0", cases.make, (14,))
    assert own_reference.is_owner() and own_reference.local_value() is cases.kept["made"]
    assert rpc.rpc_sync("worker0", cases.read, (own_reference,)) == ([14.0] * 3, True, True)
    reference = remote("worker1", cases.make, (15,))
    back = rpc.rpc_sync("worker0", cases.identity, (reference,))
    return not back.is_owner() and back.to_here().tolist() == [15.0] * 3


@pytest.mark.parametrize(
    "case",
    [
        owner_calls_user,
        user_calls_owner,
        user_calls_user,
        owner_answers_user,
        user_answers_user,
        user_answers_owner,
        worker_calls_itself,
    ],
    ids=lambda case: case.__name__,
)
def test_references_between_every_pair(team, case):
    assert team.run(0, case)


def send_before_it_is_made():
    """The owner is still at work, and a third worker already has and uses the reference."""
    reference = remote("worker1", cases.wait_for_event, ("early", torch.ones(2)))
    future = rpc.rpc_async("worker2", cases.pass_along, (reference, ["worker3", "worker1"]))
    del reference
    assert not future.done()
    rpc.rpc_sync("worker1", cases.set_event, ("early",))
    return future.wait()


def test_a_reference_travels_before_its_value_is_made(team):
    assert team.run(0, send_before_it_is_made) == [1.0, 1.0]


def nested():
    inner = remote("worker1", cases.identity, (torch.ones(2),))
    outer = remote("worker2", cases.identity, (inner,))  # a reference to a reference
    value = {"list": [RRef(41), {"inner": outer}]}
    plain, tensor = rpc.rpc_sync("worker3", cases.read_nested, (value,))
    return plain == 41 and torch.equal(tensor, torch.ones(2))


def test_references_in_lists_dicts_and_references(team):
    assert team.run(0, nested)


def start_chain():
    cases.pass_and_keep(RRef(torch.arange(3)), ["worker1", "worker2", "worker3"])


def read_chain():
    return cases.kept["chain"].to_here().tolist()


def drop_chain():
    del cases.kept["chain"]


def test_a_chain_outlives_its_links(team):
    team.run(0, start_chain)
    for rank in (0, 1, 2):  # the creator first
        team.run(rank, drop_chain)
        assert team.run(3, read_chain) == [0, 1, 2]
    assert team.run(0, cases.live_counts)["values"] == 1
    team.run(3, drop_chain)


# Errors


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def failing_function():
    reference = remote("worker1", cases.fail, ("no such key",))
    errors = [
        raised(reference.to_here),
        raised(reference.to_here),
        raised(reference.rpc_sync().keys),
    ]
    errors.append(raised(rpc.rpc_sync, "worker2", cases.read, (reference,)))
    errors.append(raised(remote("worker0", cases.fail, ("no such key",)).to_here))
    return [(type(error).__name__, error.args[0]) for error in errors]


def test_what_the_function_raised_surfaces_wherever_the_value_is_used(team):
    assert team.run(0, failing_function) == [("KeyError", "no such key")] * 5


def hidden():
    """A function that workers cannot import by its name."""


def unusable_requests():
    local = lambda: None  # noqa: E731
    assert isinstance(raised(remote, "worker1", local), NotAllowedError)
    assert isinstance(raised(remote, "worker1", cases.identity, (object(),)), NotAllowedError)
    own_reference = RRef(1)
    assert isinstance(
        raised(remote, "worker1", cases.identity, ([own_reference, object()],)), NotAllowedError
    )
    assert isinstance(raised(remote, "nobody", cases.identity, (1,)), ValueError)
    return True


def test_what_cannot_be_sent_is_refused_at_once_and_leaves_nothing(team):
    assert team.run(0, unusable_requests)


def misuse():
    reference = remote("worker1", cases.make, (1,))
    assert "can't call localValue() on user" in str(raised(reference.local_value))
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        assert isinstance(raised(function, reference), RuntimeError)
    assert repr(reference).startswith("UserRRef(") and repr(RRef(1)).startswith("OwnerRRef(")
    assert isinstance(raised(RRef(1).backward), RuntimeError)
    assert isinstance(raised(reference.backward), RuntimeError)
    assert RRef[int](3).to_here() == 3 and RRef(3, type_hint=int).local_value() == 3
    return True


def test_misuse_raises_as_in_torch(team):
    assert team.run(0, misuse)


def too_late():
    reference = remote("worker1", cases.wait_for_event, ("late", 6), timeout=0.05)
    started = time.monotonic()
    errors = [raised(reference.to_here, timeout=0.2)]
    waited_s = time.monotonic() - started
    errors += [raised(reference.to_here), raised(reference.rpc_sync().bit_length)]
    errors.append(raised(rpc.rpc_sync, "worker2", cases.identity, (reference,)))
    rpc.rpc_sync("worker1", cases.set_event, ("late",))
    assert cases.wait_until(reference.confirmed_by_owner)
    return [isinstance(error, RpcTimeoutError) for error in errors], waited_s, reference.to_here()


def test_timeouts_of_remote_and_to_here(team):
    all_late, waited_s, value = team.run(0, too_late)
    assert all_late == [True] * 4
    assert 0.2 <= waited_s < 20
    assert value == 6


def late_owner():
    own_reference = remote("worker0", cases.wait_for_event, ("own", 7))
    error = raised(own_reference.to_here, timeout=0.05)
    cases.set_event("own")
    return isinstance(error, RpcTimeoutError), own_reference.local_value(), own_reference.to_here()


def test_the_owner_waits_for_its_own_value(team):
    assert team.run(0, late_owner) == (True, 7, 7)


# Methods


def methods():
    counter = remote("worker1", cases.Counter, kwargs={"start": 10})
    assert counter.rpc_sync().add(5) == 15
    assert counter.rpc_sync(timeout=30).add(5, times=2) == 25
    assert counter.rpc_async().add(1).wait() == 26
    result = counter.remote().add(4)
    assert (result.owner_name(), result.to_here()) == ("worker1", 30)
    assert counter.rpc_sync().add_there("worker2", 12) == 42
    assert counter.rpc_async().add_there("worker2", 12).wait() == 42
    assert counter.remote().add_there("worker2", 12).to_here() == 42
    return True


def special_methods():
    proxy = remote("worker1", cases.Counter).rpc_sync()
    assert proxy.__call__(3) == 3
    assert proxy.__len__() == 3
    proxy.__setitem__("a", 1)
    assert proxy.__getitem__("a") == 1
    return proxy.__contains__("a") and not proxy.__contains__("b")


def own_methods():
    counter = RRef(cases.Counter(2))
    assert counter.rpc_sync().add(1) == 3
    assert counter.rpc_async().add(1).wait() == 4
    result = counter.remote().add(1)
    return result.is_owner() and result.local_value() == 5


@pytest.mark.parametrize(
    "case", [methods, special_methods, own_methods], ids=lambda case: case.__name__
)
def test_methods_run_at_the_owner(team, case):
    assert team.run(0, case)


def refused_methods():
    counter = remote("worker1", cases.Counter)
    for proxy in (counter.rpc_sync(), counter.rpc_async(), counter.remote()):
        assert isinstance(raised(getattr, proxy, "__private"), NotAllowedError)
    for name in ("__init__", "__reduce__", "__class__", "__dict__", "__getattribute__"):
        error = raised(getattr(cases_proxy(counter), name))
        assert isinstance(error, NotAllowedError), (name, error)
    assert isinstance(raised(counter.rpc_sync().nothing), AttributeError)
    assert isinstance(raised(counter.rpc_sync().count), TypeError)
    assert isinstance(raised(counter.rpc_sync().fail, "bad"), ValueError)
    return True


def cases_proxy(rref):
    """Calls any method by name, without the checks at the caller."""

    class Unchecked:
        def __getattribute__(self, name):
            return lambda *args: current_agent().packer.references.call(
                rref, name, [list(args), {}], 30.0
            )

    return Unchecked()


def test_private_methods_are_refused_at_both_ends(team):
    assert team.run(0, refused_methods)


def forget_at_once():
    """The reference dies before its method runs, which runs all the same."""
    blocked = remote("worker1", cases.wait_for_event, ("forget", cases.Counter))
    future = remote("worker1", cases.Counter).rpc_async().add(3)
    made = blocked.remote().__call__(5)
    del blocked
    rpc.rpc_sync("worker1", cases.set_event, ("forget",))
    return future.wait(), type(raised(made.to_here)).__name__


def test_a_call_keeps_its_reference_alive(team):
    value, error = team.run(0, forget_at_once)
    assert value == 3
    assert error == "NotAllowedError"  # a class is no object whose methods peers may call


def async_function():
    return remote("worker1", cases.add_later, ("worker2", torch.ones(2), 1)).to_here().tolist()


def test_async_execution_fills_the_value_later(team):
    assert team.run(0, async_function) == [2.0, 2.0]


# Honest and other messages


def hostile():
    """Messages that fit nothing: whatever they ask for, values and counts stay."""
    from pibroch.rpc.references.call_messages import Create, Fetch, FunctionCall
    from pibroch.rpc.references.messages import (
        Confirmed,
        CreationQuery,
        Dropped,
        MessageBatch,
        NotComing,
        Peer,
        Refused,
        Register,
        Settled,
        ValuePlace,
    )

    agent = current_agent()
    there = rpc.get_worker_info("worker1")
    reference = remote("worker1", cases.make, (3,))
    reference.to_here()
    rpc.rpc_sync("worker1", cases.keep, ("theirs", reference))
    assert cases.wait_until(lambda: cases.live_counts()["children"] == 0)
    place = reference.place()
    before = rpc.rpc_sync("worker1", cases.live_counts)
    unknown = [
        Register(ValuePlace(5, place.owner, place.owner, True), 6),
        Confirmed(5, 6),
        Refused(6),
        Settled(6),
    ]
    unknown += [
        Dropped(5, 6),
        Dropped(place.reference, 6),
        CreationQuery(5),
        NotComing(5),
        NotComing(place.reference),
    ]
    unknown += [Register(ValuePlace(5, Peer(1, 17), Peer(3, 4), False), 6)]
    for receiver in (agent.incarnation_of(there), 17):
        agent.notify(there, MessageBatch(agent.incarnation, receiver, unknown * 3))
    twice = Create(place.reference, 99, agent.incarnation, FunctionCall("reference_cases:identity"))
    errors = [raised(agent.request_sync, there, twice, [[1], {}])]
    errors.append(
        raised(agent.request_sync, there, Fetch(ValuePlace(5, place.owner, place.owner, False)))
    )
    assert [type(error).__name__ for error in errors] == ["ProtocolError", "ReferenceLostError"], (
        errors
    )
    assert rpc.rpc_sync("worker1", cases.live_counts) == before
    return reference.to_here().tolist() == [3.0] * 3


def test_messages_that_fit_nothing_change_nothing(team):
    assert team.run(0, hostile)


def expect_from_nobody():
    """A value that its creator was to ask for and never will: whoever waits for it hears so."""
    from pibroch.rpc.references.call_messages import Fetch
    from pibroch.rpc.references.messages import Peer, ValuePlace

    agent = current_agent()
    there = rpc.get_worker_info("worker1")
    creator = rpc.get_worker_info("worker2")
    rpc.rpc_sync("worker2", cases.identity, (1,))
    owner = Peer(there.id, agent.incarnation_of(there))
    place = ValuePlace(
        12345, owner, Peer(creator.id, agent.incarnation_of(creator)), seen_by_owner=False
    )
    return type(raised(agent.request_sync, there, Fetch(place), timeout=30.0)).__name__


def test_nobody_waits_for_a_value_that_will_not_come(team):
    assert team.run(0, expect_from_nobody) == ReferenceLostError.__name__


def collect_often():
    """The collector ends references at any moment, whatever locks the thread holds."""
    import gc

    before = gc.get_threshold()
    gc.set_threshold(3, 1, 1)
    try:
        for number in range(100):
            cycle = [RRef(number), remote("worker1", cases.identity, (number,))]
            cycle.append(cycle)
            assert rpc.rpc_sync("worker2", cases.identity, (cycle[:2],))[1].to_here() == number
    finally:
        gc.set_threshold(*before)
    return True


def test_references_may_end_anywhere(team):
    assert team.run(0, collect_often)
