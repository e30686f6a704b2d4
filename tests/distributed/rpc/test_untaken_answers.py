"""A peer that asks and asks and does not read.

What is kept for it is bounded, and the others do not feel it.
"""

import contextlib
import time

import hostility
import pytest
from attacker import Attacker
from hostility import SECRET
from mutations import call_of
from rpc_team import Team
from test_hostile import log_of

from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.connection import UNREAD_BYTES
from pibroch.rpc.transport.frames import Kind, header
from pibroch.rpc.values.failures import decode_failure

pytestmark = pytest.mark.timeout(120)

LIMITS = Limits(metadata_bytes=1 << 20, message_bytes=32 << 20, requests=256)
ANSWER_BYTES = 4 << 20
NUM_REQUESTS = 250
NUM_THREADS = 16
CONNECTION_ID = 0x17
ME = WorkerInfo("worker0", 0)


@pytest.fixture(scope="module")
def team():
    made = Team(2, secret=SECRET, limits=LIMITS)
    made.run(1, hostility.varied_calls, "worker0")
    yield made
    made.close()


def requests(metadata, numbers):
    return b"".join(header(Kind.REQUEST, number, len(metadata), 0) + metadata for number in numbers)


def wait_until_seen(team, num_requests):
    """Until worker 0 has seen so many requests, and works on none."""
    deadline = time.monotonic() + hostility.TIMEOUT_S
    while (seen := team.run(0, hostility.seen, Kind.REQUEST)) < num_requests or team.run(
        0, hostility.is_busy
    ):
        assert time.monotonic() < deadline, f"{seen} of {num_requests}"


@contextlib.contextmanager
def opened(team, how):
    """An attacker's connection.

    Through shared memory, over TCP alone, or with a further stream for large tensors.
    """
    with contextlib.ExitStack() as stack:
        target = team.run(0, hostility.target)
        attacker = stack.enter_context(Attacker(target, unix=how == "shared memory"))
        attacker.shake_hands(connection_id=CONNECTION_ID)
        if how == "two streams":
            bulk = stack.enter_context(Attacker(target, unix=False))
            bulk.shake_hands(connection_id=CONNECTION_ID, stream=1)
        assert attacker.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER
        yield attacker


@pytest.mark.parametrize("at_once", [8, NUM_REQUESTS])
@pytest.mark.parametrize("how", ["shared memory", "one stream", "two streams"])
def test_answers_that_a_peer_does_not_take_are_bounded(team, how, at_once):
    team.run(0, hostility.start_counting)
    with opened(team, how) as attacker:
        metadata = call_of("hostility:ones", ANSWER_BYTES)
        for first in range(1, NUM_REQUESTS + 1, at_once):
            numbers = range(first, min(first + at_once, NUM_REQUESTS + 1))
            attacker.send(requests(metadata, numbers))
            wait_until_seen(team, 1 + numbers[-1])
        owed = team.run(0, hostility.bytes_owed, "eve")
        assert owed <= LIMITS.message_bytes + NUM_THREADS * (ANSWER_BYTES + 1024)
        assert team.run(1, hostility.honest_call, "worker0")
        team.run(0, hostility.counted)
        if how != "two streams":
            answers = answers_by_number(attacker, NUM_REQUESTS)
            refused = [
                decode_failure(each.metadata, ME, None)
                for each in answers.values()
                if each.kind == Kind.FAILURE
            ]
            assert 0 < len(answers) - len(refused) < 40 and "sent back" in str(refused[-1])
        if how == "one stream":  # all is taken
            assert attacker.request(metadata).kind == Kind.ANSWER


def answers_by_number(attacker, count):
    """All answers, in place of whatever else there is about shared memory."""
    results = {}
    while len(results) < count:
        (frame,) = attacker.frames(1)
        if frame.kind in (Kind.ANSWER, Kind.FAILURE):
            results[frame.number] = frame
    return results


@pytest.mark.parametrize("what", ["overdue", "unreadable"])
def test_a_peer_that_reads_nothing_and_asks_on_is_lost(team, what):
    """Refusals lie about, too."""
    team.run(0, hostility.listen_to_log)
    team.run(0, hostility.limit_unread, 1 << 20)
    with opened(team, "shared memory") as attacker:
        metadata = call_of("hostility:ones", ANSWER_BYTES) if what == "overdue" else b"\xc1"
        attacker.send(requests(metadata, range(1, 50_000)))
        attacker.wait_closed()
    team.run(0, hostility.limit_unread, UNREAD_BYTES)
    assert log_of(team, "eve", "does not read its answers")
    assert team.run(1, hostility.honest_call, "worker0")
