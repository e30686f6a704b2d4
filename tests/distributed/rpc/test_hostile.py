"""Hostile peers: a live worker refuses what it must and says why.

It stays small and serves the next honest call.
"""

import os
import pickle
import time

import hostility
import msgspec
import pytest
from attacker import Attacker, bombard, descriptors_of
from hostility import SECRET
from mutations import Ext, call_of, mutations
from rpc_team import Team, Worker

from pibroch.errors import AuthenticationError, NotAllowedError, ProtocolError
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.frames import HEADER, Kind, header
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.codec import Code
from pibroch.rpc.values.failures import decode_failure
from pibroch.rpc.values.messages import Envelope, encode
from pibroch.wire.handshake_messages import IDLE

pytestmark = pytest.mark.timeout(240 + int(os.environ.get("PIBROCH_HOSTILE_FRAMES", "0")) // 100)

LIMITS = Limits(
    metadata_bytes=1 << 20, message_bytes=64 << 20, waiting_strangers=16, handshake_s=10.0
)
# of the attacked process, whatever it is sent under these limits; 300,000 frames took 22 MB
MAX_GROWTH_BYTES = 48 << 20
# without a handshake, and with one
NUM_FRAMES = int(os.environ.get("PIBROCH_HOSTILE_FRAMES", "20000"))


@pytest.fixture(scope="module")
def team():
    made = Team(2, secret=SECRET, limits=LIMITS)
    # all connections that honest calls need are there
    made.run(1, hostility.varied_calls, "worker0")
    yield made
    made.close()


@pytest.fixture
def victim(team):
    """Where worker 0 listens.

    Afterwards it still serves, and has closed all that the attack opened.
    """
    team.run(0, hostility.listen_to_log)
    assert team.run(1, hostility.honest_call, "worker0")
    before = team.run(0, hostility.state)
    yield team.run(0, hostility.target)
    assert team.run(1, hostility.honest_call, "worker0")
    deadline = time.monotonic() + hostility.TIMEOUT_S
    while (after := team.run(0, hostility.state))["files"] > before[
        "files"
    ] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after["files"] <= before["files"]


def log_of(team, *words):
    """The first line of worker 0's log with all of ``words``, as soon as it is there."""
    deadline = time.monotonic() + hostility.TIMEOUT_S
    while time.monotonic() < deadline:
        lines = team.run(0, hostility.logged)
        for line in lines:
            if all(word in line for word in words):
                return line
        time.sleep(0.02)
    raise AssertionError(f"no line with {words} in {lines[:3]} and {len(lines) - 3} others")


def error_in(frame):
    """The error that a failure frame carries."""
    assert frame.kind == Kind.FAILURE, f"got {frame}"
    return decode_failure(frame.metadata, WorkerInfo("worker0", 0), Callables(()))


# who may connect


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_a_wrong_secret_is_refused_on_both_sides(team, victim, unix):
    with (
        Attacker(victim, unix=unix) as attacker,
        pytest.raises(AuthenticationError, match="our secret is not its own"),
    ):
        attacker.shake_hands(secret=b"not the secret of this job")
    assert log_of(team, "refused a connection", "AuthenticationError").startswith("WARNING")


def test_a_worker_with_a_wrong_secret_learns_it_when_it_calls(team, victim):
    stranger = Worker()
    try:
        name, text = stranger.run(
            hostility.call_as_stranger, "stranger", team.port, b"not the secret of this job"
        )
    finally:
        stranger.close()
    assert name == "AuthenticationError" and "secret" in text
    assert log_of(team, "refused a connection", "AuthenticationError")


def test_a_repeated_handshake_is_refused(team, victim):
    with Attacker(victim) as attacker:
        message = attacker.shake_hands()
    with Attacker(victim) as again:
        again.socket.recv(4096)
        again.send(message)
        assert again.socket.recv(4096) == b"\x01\x00\x01"
        again.wait_closed()
    assert log_of(team, "AuthenticationError", "repeated handshake")


def test_who_wants_another_worker_or_version_is_told(team, victim):
    with (
        Attacker(victim) as attacker,
        pytest.raises(AuthenticationError, match="'worker0' at the address of worker 'other'"),
    ):
        attacker.shake_hands(expected="other")
    with Attacker(victim) as attacker, pytest.raises(AuthenticationError, match="versions"):
        attacker.shake_hands(versions=(7, 9))
    assert log_of(team, "AuthenticationError", "wants worker 'other'")


def test_strangers_who_wait_do_not_keep_honest_ones_out(team, victim):
    strangers = [Attacker(victim, unix=bool(i % 2)) for i in range(6 * LIMITS.waiting_strangers)]
    try:
        for stranger in strangers:
            stranger.send(b"\x40")  # the first byte of a message that never comes
        for unix in (True, False):
            with Attacker(victim, unix=unix) as honest:
                honest.shake_hands(name=f"honest{unix}")
                assert honest.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER
        waiting = team.run(0, hostility.state)["sockets"]
        assert waiting <= 2 * LIMITS.waiting_strangers + 16
    finally:
        for stranger in strangers:
            stranger.socket.close()


def test_without_descriptors_it_neither_spins_nor_stays_deaf(team, victim):
    team.run(0, hostility.limit_files, 5)
    strangers = [Attacker(victim, unix=bool(i % 2)) for i in range(12)]
    try:
        used = team.run(0, hostility.cpu_seconds)
        time.sleep(1)  # what it uses in this time is measured
        assert team.run(0, hostility.cpu_seconds) - used < 0.4
        with Attacker(victim) as honest:  # the oldest strangers go, so that it has its turn
            honest.shake_hands()
            assert honest.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER
    finally:
        team.run(0, hostility.limit_files, None)
        for stranger in strangers:
            stranger.socket.close()


def test_more_than_a_handshake_is_not_read_before_it(team, victim):
    with Attacker(victim) as attacker:
        attacker.send((2000).to_bytes(2, "little") + bytes(2000))
        attacker.wait_closed()
    assert log_of(team, "ProtocolError", "2000 bytes")


# what may be said


@pytest.mark.parametrize("length", ["metadata", "payload"])
def test_oversize_lengths_close_the_connection_at_the_header(team, victim, length):
    lengths = (2**32 - 1, 0) if length == "metadata" else (0, 2**63)
    with Attacker(victim) as attacker:
        attacker.shake_hands()
        attacker.send(header(Kind.REQUEST, 1, *lengths))
        attacker.wait_closed()
    assert log_of(team, "eve", "is lost", f"{max(lengths):,} bytes")


@pytest.mark.parametrize(
    "start", [b"pb\x03\x01", b"pb\x02\x63", b"GET ", b"pb\x02\x08", b"pb\x02\x00"], ids=repr
)
def test_what_is_no_frame_closes_the_connection(team, victim, start):
    with Attacker(victim) as attacker:
        attacker.shake_hands()
        attacker.send(start + bytes(HEADER.size - len(start)))
        attacker.wait_closed()
    assert log_of(team, "eve", "is lost", "frame")


LAYER = Ext(Code.NAMED, encode("torch.nn:Linear"))
OPEN_LAYER = Ext(Code.NAMED, encode("hostility:Layer"))
REFUSED = [
    ("an unknown body", encode([msgspec.Raw(encode(["nonsense"])), None]), "ProtocolError"),
    ("a body with wrong fields", encode([msgspec.Raw(encode(["call", 5])), None]), "ProtocolError"),
    ("no envelope", encode({"a": 1}), "ProtocolError"),
    ("an unknown form", call_of("hostility:echo", Ext(77, b"")), "ProtocolError"),
    ("a missing tensor", call_of("hostility:echo", Ext(Code.TENSOR, encode(3))), "ProtocolError"),
    (
        "an unknown type of tensors",
        encode([msgspec.Raw(encode(["call", "hostility:echo"])), None, [[99, [1]]]]),
        "ProtocolError",
    ),
    (
        "a shape below zero",
        encode([msgspec.Raw(encode(["call", "hostility:echo"])), None, [[0, [-1]]]]),
        "ProtocolError",
    ),
    (
        "a shape beyond memory",
        encode([msgspec.Raw(encode(["call", "hostility:echo"])), None, [[0, [2**61]]]]),
        "ProtocolError",
    ),
    (
        "an empty shape beyond numbers",
        encode([msgspec.Raw(encode(["call", "hostility:echo"])), None, [[0, [0, 2**64 - 1]]]]),
        "ProtocolError",
    ),
    (
        "a segment that is not there",
        encode([msgspec.Raw(encode(["call", "hostility:echo"])), None, [[0, [1], 5]]]),
        "ProtocolError",
    ),
    (
        "a tensor given back that was not lent",
        encode([msgspec.Raw(encode(["call", "hostility:echo"])), None, [[0, [1], 1, 0, True]]]),
        "ProtocolError",
    ),
    (
        "too deep",
        call_of("hostility:echo", raw=b"\x92\x91" + b"\x91" * 100_000 + b"\xc0\x80"),
        "ProtocolError",
    ),
    ("arguments that are none", call_of("hostility:echo", raw=encode(5)), "ProtocolError"),
    ("a module that is not allowed", call_of("os:system", "true"), "NotAllowedError"),
    ("what a module imported", call_of("hostility:random"), "NotAllowedError"),
    (
        "a function that a module imported",
        call_of("hostility:contextlib.suppress"),
        "NotAllowedError",
    ),
    ("imported into the main program", call_of("__main__:system", "true"), "NotAllowedError"),
    ("a private name", call_of("hostility:__private"), "NotAllowedError"),
    ("a dunder", call_of("hostility:Pair.__init__"), "NotAllowedError"),
    ("torch.load", call_of("torch:load", "/etc/passwd"), "NotAllowedError"),
    ("eval", call_of("builtins:eval", "1"), "NotAllowedError"),
    (
        "a function by name among the arguments",
        call_of("hostility:echo", Ext(Code.NAMED, encode("os:system"))),
        "NotAllowedError",
    ),
    (
        "a large layer through a function that takes functions",
        call_of("pibroch.rpc.functions:apply", LAYER, [2**20, 2**20], {}),
        "NotAllowedError",
    ),
    (
        "a large layer as a remote module",
        call_of("pibroch.rpc.remote_module:make_module", LAYER, [2**20, 2**20], {}, "cpu"),
        "NotAllowedError",
    ),
    (
        "a layer that is nowhere",
        call_of("pibroch.rpc.remote_module:make_module", OPEN_LAYER, [2, 2], {}, "meta"),
        "NotAllowedError",
    ),
    (
        "a remote module that refers to nothing",
        call_of(
            "hostility:echo",
            Ext(
                Code.OBJECT,
                encode(["pibroch.rpc.remote_module:RemoteModule", ["worker0", "cpu", None]]),
            ),
        ),
        "ProtocolError",
    ),
    (
        "an object by name",
        call_of("hostility:echo", Ext(Code.OBJECT, encode(["os:stat_result", []]))),
        "NotAllowedError",
    ),
]


@pytest.mark.parametrize(
    ("metadata", "name"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_bad_message_fails_alone_with_a_named_error_and_a_line_in_the_log(
    team, victim, metadata, name
):
    with Attacker(victim) as attacker:
        attacker.shake_hands()
        error = error_in(attacker.request(metadata))
        assert type(error).__name__ == name, f"got {error!r}"
        # the connection lives
        assert attacker.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER
    assert log_of(team, "eve", str(error)[:60]).startswith("WARNING")


def test_a_worker_cannot_answer_what_another_one_was_asked(team, victim):
    asking = team.run(1, hostility.target)
    team.workers[1].start(hostility.call_that_waits, "worker0")
    team.run(0, hostility.wait_until_entered)
    forged = envelope(["answer"], "forged")
    failure = encode(["builtins:ValueError", "forged"])
    with Attacker(asking) as attacker:
        attacker.shake_hands(expected="worker1")
        for number in range(2000):
            attacker.send(header(Kind.ANSWER, number, len(forged), 0) + forged)
            attacker.send(header(Kind.FAILURE, number, len(failure), 0) + failure)
        # it has read all of them
        assert attacker.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER
    team.run(0, hostility.release)
    assert team.workers[1].result() == "true"


METHODS = ["__class__", "__init__", "__dict__", "__hidden", "__reduce__"]


@pytest.mark.parametrize("method", METHODS)
def test_private_methods_of_referenced_values_are_refused(team, victim, method):
    with Attacker(victim) as attacker:
        attacker.shake_hands()
        place, value = create(attacker, team, "hostility:Counter", 1)
        assert attacker.request(envelope(["method", place, "up"], value)).kind == Kind.ANSWER
        error = error_in(attacker.request(envelope(["method", place, method], value)))
        assert isinstance(error, NotAllowedError) and method in str(error)
    assert log_of(team, "WARNING", "eve", method)


def test_an_array_behind_a_reference_does_not_write_files(team, victim, tmp_path):
    with Attacker(victim) as attacker:
        attacker.shake_hands()
        place, _ = create(
            attacker, team, "hostility:as_array", Ext(Code.TENSOR, encode(0)), tensors=[[0, [0]]]
        )
        error = error_in(
            attacker.request(envelope(["method", place, "tofile"], [[str(tmp_path / "file")], {}]))
        )
        assert isinstance(error, NotAllowedError)
    assert not list(tmp_path.iterdir())


def create(attacker, team, function, argument, tensors=()):
    """Have a value made; its place, and a value for calls of its methods."""
    body = ["create", 5, 6, attacker.INCARNATION, ["function", function]]
    frame = attacker.request(envelope(body, [[argument], {}], tensors))
    assert frame.kind == Kind.ANSWER, error_in(frame)
    owner = team.run(0, hostility.incarnation)
    return [5, [0, owner], [attacker.ID, attacker.INCARNATION], True], [[1], {}]


def envelope(body, value, tensors=()):
    return encode([msgspec.Raw(encode(body)), msgspec.Raw(encode(value)), list(tensors)])


@pytest.mark.parametrize(
    "function",
    [
        "os:system",
        "__main__:system",
        "torch:load",
        "hostility:__private",
        "pibroch.wire.secret:find_secret",
    ],
)
def test_an_honest_caller_gets_the_named_error(team, victim, function):
    name, text = team.run(1, hostility.call_for_error, "worker0", function)
    assert name == "NotAllowedError" and function in text
    assert log_of(team, "worker1", function).startswith("WARNING")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_are_never_opened(team, victim, tmp_path):
    path = tmp_path / "opened"
    data = pickle.dumps(Trap(path))
    pickle.loads(data)
    assert path.exists(), "the trap works"
    path.rmdir()
    with Attacker(victim) as attacker:
        attacker.shake_hands()
        frame = attacker.request(call_of("hostility:echo", Ext(Code.PICKLE, data)))
        assert (
            "a pickle" in str(error_in(frame))
            and type(error_in(frame)).__name__ == "NotAllowedError"
        )
        assert error_in(attacker.request(data))  # as metadata
        assert error_in(
            attacker.request(
                encode(
                    Envelope(
                        msgspec.Raw(encode(["call", "hostility:echo"])), msgspec.Raw(encode(data))
                    )
                )
            )
        )
        for kind in (Kind.FAILURE, Kind.ANSWER, Kind.NOTE):
            attacker.send(header(kind, 1, len(data), 0) + data)
        # bytes are just bytes
        assert attacker.request(call_of("hostility:echo", data)).kind == Kind.ANSWER
    with Attacker(victim) as attacker:
        attacker.send(data)  # in place of a handshake
        attacker.wait_closed()
    assert not path.exists()


@pytest.mark.parametrize(
    "kind", ["unsealed", "may grow", "may shrink", "short", "file", "pipe", "none"]
)
def test_shared_memory_that_could_change_under_us_is_refused(team, victim, kind):
    metadata = encode(1 << 20)
    descriptors = [] if kind == "none" else [descriptors_of(kind)]
    try:
        with Attacker(victim) as attacker:
            attacker.shake_hands()
            attacker.send(header(Kind.SEGMENT, 1, len(metadata), 0) + metadata, descriptors)
            attacker.wait_closed()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert log_of(team, "eve", "is lost", "descriptor" if kind == "none" else "shared segment")


def test_a_sealed_segment_is_taken_once(team, victim):
    descriptor = descriptors_of("sealed")
    metadata = encode(1 << 20)
    try:
        with Attacker(victim) as attacker:
            attacker.shake_hands()
            announcement = header(Kind.SEGMENT, 1, len(metadata), 0) + metadata
            attacker.send(announcement, [descriptor])
            tensor = encode(
                [
                    msgspec.Raw(encode(["call", "hostility:echo"])),
                    [[Ext(Code.TENSOR, encode(0))], {}],
                    [[4, [8], 1, 64]],
                ]
            )
            assert attacker.request(tensor).kind == Kind.ANSWER
            outside = encode(
                [
                    msgspec.Raw(encode(["call", "hostility:echo"])),
                    [[Ext(Code.TENSOR, encode(0))], {}],
                    [[4, [8], 1, 1 << 20]],
                ]
            )
            assert isinstance(error_in(attacker.request(outside)), ProtocolError)
            attacker.send(announcement, [descriptor])
            attacker.wait_closed()
    finally:
        os.close(descriptor)
    assert log_of(team, "eve", "is lost", "shared segment 1")


# many frames; PIBROCH_HOSTILE_FRAMES=300000 by hand


def test_a_bombardment_by_strangers_changes_nothing(team, victim):
    seeds = recorded_frames(team)
    bombarded(team, victim, seeds, NUM_FRAMES, admitted=False)
    assert log_of(team, "refused a connection", "ProtocolError")


def test_a_bombardment_by_who_knows_the_secret_changes_nothing(team, victim):
    seeds = recorded_frames(team)
    bombarded(team, victim, seeds, NUM_FRAMES, admitted=True)
    assert (
        log_of(team, "eve", "is lost")
        and log_of(team, "unreadable message")
        and log_of(team, "not allowed here")
    )


def recorded_frames(team):
    """All frames of varied calls between the two workers, in both directions."""
    for rank in (0, 1):
        team.run(rank, hostility.start_recording)
    assert team.run(1, hostility.varied_calls, "worker0")
    frames = [
        frame
        for rank in (0, 1)
        for frame in team.run(rank, hostility.recorded)
        if len(frame) < 1 << 16
    ]
    assert len(frames) > 50
    return frames


def bombarded(team, victim, seeds, num_frames, admitted):
    team.run(0, hostility.forget_peak)
    team.run(0, hostility.start_counting)
    team.run(0, hostility.watch_for_stalls)
    before = team.run(0, hostility.state)
    sent, connections = bombard(victim, mutations(seeds, num_frames), admitted=admitted)
    assert sent == num_frames and connections > num_frames // 60
    assert team.run(1, hostility.honest_call, "worker0")
    after = team.run(0, hostility.state)
    understood = team.run(0, hostility.counted)
    assert not team.run(0, hostility.stalls)
    if admitted:  # most were looked at: the others came behind one that ended its connection
        assert sum(understood.values()) + connections > num_frames * 3 // 4, (
            f"{understood}, {connections} connections"
        )
    assert after["peak"] - before["rss"] < MAX_GROWTH_BYTES, f"{before} became {after}"
    used_s = []
    while not used_s or used_s[-1] >= 0.25:  # it has nothing to do soon: no loop was left behind
        assert len(used_s) < 20, f"{used_s} s of CPU in half a second each"
        before_s = team.run(0, hostility.cpu_seconds)
        time.sleep(0.5)
        used_s.append(team.run(0, hostility.cpu_seconds) - before_s)


def test_who_sends_on_the_idle_stream_loses_its_connection(team, victim):
    with Attacker(victim, unix=False) as first, Attacker(victim, unix=False) as idle:
        first.shake_hands(connection_id=1)
        idle.shake_hands(connection_id=1, stream=IDLE)
        assert first.request(call_of("hostility:add", 1, 2)).kind == Kind.ANSWER
        idle.send(header(Kind.REQUEST, 1, 0, 0))
        first.wait_closed()
        idle.wait_closed()
    assert team.run(1, hostility.honest_call, "worker0")
