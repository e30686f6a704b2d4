from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.rpc.calls.pending import PendingCall, PendingCalls


class Outcome:
    def succeed(self, value):
        raise AssertionError("not the table's task")

    fail = succeed


def call(number, peer="peer", timeout_s=10.0):
    return PendingCall(number, peer, Outcome(), timeout_s)


def test_a_call_is_taken_once_and_by_its_peer_only():
    calls = PendingCalls()
    calls.add(call(1, "b"), now=0.0)
    assert calls.take(1, "c") is None
    assert calls.take(1, "b").number == 1
    assert calls.take(1, "b") is None and len(calls) == 0


def test_calls_expire_in_time_and_not_before():
    calls = PendingCalls()
    assert calls.add(call(1, timeout_s=5.0), now=0.0) == 5.0
    assert calls.add(call(2, timeout_s=1.0), now=0.5) == 1.5
    assert calls.add(call(3, timeout_s=0.0), now=0.0) is None, "no timeout"
    assert calls.next_deadline() == 1.5
    assert calls.expire(1.4) == []
    assert [late.number for late in calls.expire(1.5)] == [2]
    assert [late.number for late in calls.expire(100.0)] == [1]
    assert calls.next_deadline() is None and len(calls) == 1


def test_the_calls_of_a_lost_peer():
    calls = PendingCalls()
    one = object()
    other = object()
    for number in range(10):
        calls.add(call(number, one if number % 2 else other), now=0.0)
    assert sorted(each.number for each in calls.take_all(one)) == [1, 3, 5, 7, 9]
    assert sorted(each.number for each in calls.take_all()) == [0, 2, 4, 6, 8]


def test_finished_calls_do_not_pile_up_behind_one_that_lasts():
    calls = PendingCalls()
    calls.add(call(0), now=0.0)
    for number in range(1, 100_000):
        calls.add(call(number), now=number * 1e-6)
        calls.take(number, "peer")
    assert len(calls._deadlines) < 2000


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 2.5, 7.0]), st.booleans(), st.floats(0, 3)),
        max_size=60,
    )
)
def test_every_call_ends_exactly_once(steps):
    calls = PendingCalls()
    now = 0.0
    ended = []
    started = []
    for number, (timeout_s, finishes, passes) in enumerate(steps):
        calls.add(call(number, timeout_s=timeout_s), now)
        started.append((number, now + timeout_s if timeout_s else None))
        now += passes
        due = {
            each for each, deadline in started if deadline is not None and deadline <= now
        } - set(ended)
        late = [each.number for each in calls.expire(now)]
        assert set(late) == due
        ended += late
        if finishes and number not in ended:
            assert calls.take(number, "peer").number == number
            ended.append(number)
    ended += [each.number for each in calls.take_all()]
    assert sorted(ended) == list(range(len(steps)))
