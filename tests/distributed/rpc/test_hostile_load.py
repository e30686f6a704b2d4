"""What admitted and foreign processes cannot do by mere numbers.

Fill memory, stop the loop, keep workers from starting.
"""

import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import hostility
import msgspec
import pytest
from attacker import Attacker
from hostility import SECRET
from mutations import Ext, call_of
from rpc_team import Team

from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.frames import Kind, header
from pibroch.rpc.values.codec import Code
from pibroch.rpc.values.failures import decode_failure
from pibroch.rpc.values.messages import encode

pytestmark = pytest.mark.timeout(240)

LIMITS = Limits(metadata_bytes=1 << 20, message_bytes=64 << 20, requests=64)
NUM_MESSAGES = 20_000
MAX_GROWTH_BYTES = 128 << 20
NOBODY = 65534
SOON_S = 6.0
MAKE = ["function", "builtins:len"]


@pytest.fixture(scope="module")
def team():
    # more threads than requests of one peer: those that wait hold up nobody else
    made = Team(2, secret=SECRET, limits=LIMITS, num_worker_threads=2 * LIMITS.requests)
    made.run(1, hostility.varied_calls, "worker0")
    yield made
    made.close()


def frame(kind, metadata, number=0):
    return header(kind, number, len(metadata), 0) + metadata


def leavings(attacker, owner, chance):
    """Endless messages, each of which could leave something behind."""
    body = msgspec.Raw(encode(["call", "hostility:echo"]))
    value = msgspec.Raw(encode([[], {}]))
    me = [attacker.ID, attacker.INCARNATION]
    number = 1 << 40
    while True:
        number += 7
        other = chance.choice([me, [0, owner], [1, 5], [chance.randrange(2, 1 << 30), 1]])
        place = [number, chance.choice([[0, owner], other]), other, False]
        contexts = [1, number, chance.randrange(1, 50)]
        context = chance.choice(contexts)
        wire = [
            place,
            f"worker{number}",
            chance.choice([me, me, [attacker.ID, number]]),
            number + 1,
        ]
        yield chance.choice(
            [
                frame(
                    Kind.REQUEST,
                    encode([body, value, [], context, [context, other, number, []]]),
                    number,
                ),
                frame(
                    Kind.REQUEST,
                    encode([["discover", context, number, other[0], [], 0.0], None]),
                    number,
                ),
                frame(
                    Kind.REQUEST, encode([["backward", context, number, False, 0.0], None]), number
                ),
                frame(Kind.NOTE, encode([["gradients", context, number, number], []])),
                frame(Kind.NOTE, encode([["release", context + 1], None])),
                frame(Kind.REQUEST, encode([body, value, [], None, None, [wire]]), number),
                frame(
                    Kind.NOTE,
                    encode(
                        [
                            [
                                "refs",
                                attacker.INCARNATION,
                                owner,
                                [["register", place, number + 2]] * 3,
                            ],
                            None,
                        ]
                    ),
                ),
                frame(
                    Kind.NOTE,
                    encode([["refs", number, owner, [["register", place, number + 2]]], None]),
                ),
                frame(
                    Kind.REQUEST,
                    encode(
                        [
                            [
                                "create",
                                number,
                                number + 3,
                                chance.choice([attacker.INCARNATION, 7]),
                                MAKE,
                            ],
                            [[[1]], {}],
                        ]
                    ),
                    number,
                ),
                frame(Kind.REQUEST, encode([["fetch", place], None]), number),
            ]
        )


def settled(team, wanted):
    """What is left behind, once ``wanted`` holds for it."""
    deadline = time.monotonic() + hostility.TIMEOUT_S
    while not wanted(left := team.run(0, hostility.left_behind)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    return left


def test_what_twenty_thousand_messages_leave_behind_is_bounded_and_goes_with_their_sender(team):
    team.run(0, hostility.listen_to_log)
    before = settled(team, lambda left: not left["busy"])
    memory = team.run(0, hostility.state)
    target = team.run(0, hostility.target)
    owner = team.run(0, hostility.incarnation)
    chance = random.Random(0)
    with Attacker(target) as attacker:
        attacker.shake_hands()
        messages = leavings(attacker, owner, chance)
        with ThreadPoolExecutor(1) as pool:
            for start in range(0, NUM_MESSAGES, 500):
                batch = b"".join(next(messages) for _ in range(500)) + frame(
                    Kind.REQUEST, call_of("hostility:add", 1, 2), start + 1
                )
                sending = pool.submit(attacker.send, batch)
                while attacker.frames(1)[0].number != start + 1:
                    pass
                sending.result()
        during = team.run(0, hostility.left_behind)
        assert team.run(1, hostility.honest_call, "worker0")
    assert 0 < during["autograd contexts"] <= 4096 + before["autograd contexts"]
    assert during["autograd passes"] <= 256 * 60
    after = settled(
        team,
        lambda left: all(
            left[kind] <= before[kind] for kind in before if kind not in ("workers lost", "busy")
        ),
    )
    assert after["workers lost"] <= 4096
    assert team.run(0, hostility.state)["rss"] - memory["rss"] < MAX_GROWTH_BYTES
    assert team.run(1, hostility.honest_call, "worker0")


def test_more_requests_than_one_worker_may_have_under_way_are_refused_one_by_one(team):
    target = team.run(0, hostility.target)
    waiting = call_of("hostility:answer_when_released")
    with Attacker(target) as attacker:
        attacker.shake_hands()
        attacker.send(
            b"".join(
                frame(Kind.REQUEST, waiting, number) for number in range(1, 2 * LIMITS.requests + 1)
            )
        )
        refused = attacker.frames(LIMITS.requests)
        assert {each.kind for each in refused} == {Kind.FAILURE}
        error = decode_failure(refused[0].metadata, WorkerInfo("worker0", 0), None)
        assert "limits.requests" in str(error)
        assert team.run(1, hostility.honest_call, "worker0")
        team.run(0, hostility.release)
        assert {each.kind for each in attacker.frames(LIMITS.requests)} == {Kind.ANSWER}
        assert attacker.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER


BOMBS = [
    encode(
        [
            msgspec.Raw(encode(["call", "hostility:echo"])),
            [[Ext(Code.SIZE, encode([2**30, "AAAAAAAA"]))], {}],
        ]
    ),
    call_of("builtins:pow", 7, 10**8),
    call_of("builtins:sum", Ext(Code.RANGE, encode([0, 2**40, 1]))),
    call_of("builtins:list", Ext(Code.RANGE, encode([0, 2**40, 1]))),
    call_of("torch:tensor", Ext(Code.RANGE, encode([0, 2**40, 1]))),
    call_of("torch:ones", 2**20, 2**20),
    call_of("torch:Tensor", 5, 5, Ext(Code.DEVICE, encode("meta"))),
    encode([msgspec.Raw(encode(["call", "torch:Tensor"])), [[], {"cdata": 12345678}]]),
    call_of("pibroch.rpc.api:shutdown"),
]


@pytest.mark.parametrize("metadata", BOMBS, ids=range(len(BOMBS)))
def test_a_small_message_neither_stops_nor_ends_a_worker(team, metadata):
    with Attacker(team.run(0, hostility.target)) as attacker:
        attacker.shake_hands()
        began = time.monotonic()
        assert attacker.request(metadata).kind == Kind.FAILURE
        assert team.run(1, hostility.honest_call, "worker0")
        assert time.monotonic() - began < 10


def test_an_array_behind_a_reference_cannot_be_made_to_look_at_freed_memory(team):
    from test_hostile import create, envelope

    with Attacker(team.run(0, hostility.target)) as attacker:
        attacker.shake_hands()
        place, _ = create(
            attacker, team, "hostility:as_array", Ext(Code.TENSOR, encode(0)), tensors=[[0, [0]]]
        )
        for method in ("view", "resize", "fill", "setflags", "__setitem__"):
            assert (
                attacker.request(envelope(["method", place, method], [[], {}])).kind == Kind.FAILURE
            )


@pytest.mark.parametrize("by", [1, 100, 100_000])
def test_after_a_damaged_length_a_call_fails_and_the_next_ones_work(team, by):
    usual = team.run(0, hostility.give_up_frames_after, SOON_S)
    try:
        team.run(1, hostility.corrupt_next_length, by)
        errors = team.run(1, hostility.call_until_it_works, "worker0", SOON_S / 3)
    finally:
        team.run(0, hostility.give_up_frames_after, usual)
    assert 0 < len(errors) < 10 and set(errors) <= {"RpcTimeoutError", "WorkerLostError"}


def flood(seconds):
    """As another user, dial all of pibroch's sockets again and again."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        end = time.monotonic() + seconds
        held = []
        while time.monotonic() < end:
            with open("/proc/net/unix") as sockets:
                names = {line.split()[-1][1:] for line in sockets if "@pibroch-" in line}
            for name in names:
                for _ in range(200):
                    one = socket.socket(socket.AF_UNIX)
                    one.setblocking(False)
                    one.connect_ex("\0" + name)
                    held.append(one)
            while len(held) > 400:
                held.pop(0).close()
    finally:
        os._exit(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can be another user")
def test_workers_start_while_another_user_floods_their_sockets():
    flooding = flood(60)
    try:
        for _ in range(2):
            made = Team(2, secret=SECRET)
            assert made.run(1, hostility.honest_call, "worker0") and made.run(
                0, hostility.honest_call, "worker1"
            )
            made.close()
    finally:
        os.kill(flooding, signal.SIGKILL)
        os.waitpid(flooding, 0)


def test_checksums_are_for_all_calls(team):
    made = Team(2, checksums=True)
    try:
        assert made.run(1, hostility.varied_calls, "worker0") and made.run(
            1, hostility.honest_call, "worker0"
        )
        made.run(0, hostility.give_up_frames_after, SOON_S)
        made.run(1, hostility.corrupt_next_length, 100)
        assert made.run(1, hostility.call_until_it_works, "worker0", 30.0) == ["WorkerLostError"]
    finally:
        made.close()
