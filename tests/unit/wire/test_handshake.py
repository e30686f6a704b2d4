"""The handshake: what it admits, what it refuses, and that it never reads or says too much."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.errors import AuthenticationError, ProtocolError
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import MAGIC, MAX_MESSAGE_BYTES, Identity, Purpose

SECRET = b"a secret of sixteen bytes or more"
ANN = Identity("ann", 3, 2**63 + 7)
BEN = Identity("ben", 5, 11)
PURPOSE = Purpose(connection_id=2**61 + 1, stream=2)


def client(secret=SECRET, expected="ben", **kwargs):
    return Client(secret, ANN, expected, PURPOSE, **kwargs)


def shake(client, server, step=None):
    """Carries bytes both ways, ``step`` at a time, until both are done."""
    to_client = server.start()
    to_server = client.start()
    for _ in range(10_000):
        if client.done and server.done:
            return
        if to_client:
            cut = step or len(to_client)
            data = to_client[:cut]
            to_client = to_client[cut:]
            to_server += client.receive(data)
        if to_server:
            cut = step or len(to_server)
            data = to_server[:cut]
            to_server = to_server[cut:]
            to_client += server.receive(data)
    raise AssertionError("the handshake does not end")


@pytest.mark.parametrize("step", [None, 1, 7, 50])
def test_both_learn_who_the_other_is(step):
    a = client()
    b = Server(SECRET, BEN)
    shake(a, b, step)
    assert (a.peer, b.peer, b.purpose) == (BEN, ANN, PURPOSE)
    assert (a.version, b.version, a.surplus, b.surplus) == (3, 3, b"", b"")


def test_the_server_says_magic_versions_and_nonce_only_before_the_proof():
    first = Server(SECRET, BEN).start()
    second = Server(SECRET, BEN).start()
    assert first[:12] == MAGIC + bytes([3, 0, 3, 0]) and len(first) == 44
    assert first[12:] != second[12:]


def test_bytes_after_the_handshake_are_kept():
    a = client()
    b = Server(SECRET, BEN)
    reply = b.receive(a.receive(b.start()) + b"early")
    assert b.done and b.surplus == b"early"
    a.receive(reply + b"frame")
    assert a.surplus == b"frame"
    a.receive(b"more")
    b.receive(b" bird")
    assert (a.surplus, b.surplus) == (b"framemore", b"early bird")


def refused(client, server):
    """The errors on both sides of a handshake that the server refuses."""
    with pytest.raises((AuthenticationError, ProtocolError)) as at_server:
        server.receive(client.receive(server.start()))
    with pytest.raises((AuthenticationError, ProtocolError)) as at_client:
        client.receive(server.refusal)
    assert not client.done and not server.done and server.surplus == b""
    return at_client.value, at_server.value


def test_a_wrong_secret_is_refused_and_both_say_so():
    at_client, at_server = refused(client(b"another secret, long enough"), Server(SECRET, BEN))
    assert isinstance(at_client, AuthenticationError) and "our secret is not its own" in str(
        at_client
    )
    assert isinstance(at_server, AuthenticationError) and "without the job's secret" in str(
        at_server
    )


def test_a_stranger_does_not_learn_the_servers_name():
    a = client(b"another secret, long enough")
    b = Server(SECRET, BEN)
    refused(a, b)
    assert b"ben" not in b.refusal and len(b.refusal) == 3


def test_a_wrong_worker_is_named():
    at_client, at_server = refused(client(expected="carl"), Server(SECRET, BEN))
    assert isinstance(
        at_client, AuthenticationError
    ) and "'ben' at the address of worker 'carl'" in str(at_client)
    assert isinstance(at_server, AuthenticationError) and "wants worker 'carl'" in str(at_server)


def test_versions_are_negotiated():
    a = client(versions=(1, 4))
    b = Server(SECRET, BEN, versions=(2, 3))
    shake(a, b)
    assert a.version == b.version == 3


def test_versions_without_a_common_one_are_refused():
    with pytest.raises(AuthenticationError, match="speaks versions 3 to 4; need one of 1 to 2"):
        client(versions=(1, 2)).receive(Server(SECRET, BEN, versions=(3, 4)).start())


def test_versions_cannot_be_lowered_on_the_way():
    a = client(versions=(1, 3))
    b = Server(SECRET, BEN, versions=(1, 3))
    hello = bytearray(b.start())
    hello[10] = 1  # highest version
    with pytest.raises(AuthenticationError):
        b.receive(a.receive(bytes(hello)))


def test_a_client_that_chooses_another_version_is_refused():
    a = client(versions=(1, 1))
    b = Server(SECRET, BEN, versions=(1, 1))
    b._versions = (2, 2)  # the server changed its mind: its hello and what it accepts differ
    at_client, at_server = refused(a, b)
    assert "does not speak version 1" in str(at_client) and "version 1 by worker 'ann'" in str(
        at_server
    )


def test_a_repeated_handshake_is_refused():
    a = client()
    b = Server(SECRET, BEN)
    recorded = a.receive(b.start())
    b.receive(recorded)
    again = Server(SECRET, BEN)
    with pytest.raises(AuthenticationError, match="repeated handshake"):
        again.receive(recorded)
    assert not again.done


def test_a_recorded_server_cannot_be_played_back():
    a = client()
    b = Server(SECRET, BEN)
    hello = b.start()
    reply = b.receive(a.receive(hello))
    fresh = client()
    fresh.receive(hello)
    with pytest.raises(AuthenticationError, match="a server without the job's secret"):
        fresh.receive(reply)


def test_a_server_without_the_secret_cannot_reflect_the_proof():
    a = client(expected="ann")
    sent = a.receive(Server(SECRET, ANN).start())
    proof = sent[-32:]
    said = b"\0" + bytes(16) + b"\3ann"
    with pytest.raises(AuthenticationError, match="without the job's secret"):
        a.receive((len(said) + 32).to_bytes(2, "little") + said + proof)


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request", b"\x89PBRPC\n", b"\0", b"S"])
def test_a_client_knows_at_the_first_byte_that_this_is_no_worker(garbage):
    with pytest.raises(ProtocolError, match="need a pibroch worker"):
        client().receive(garbage)


def test_an_oversize_message_is_refused_at_its_length():
    b = Server(SECRET, BEN)
    with pytest.raises(ProtocolError, match="2000 bytes"):
        b.receive((2000).to_bytes(2, "little"))
    a = client()
    a.receive(Server(SECRET, BEN).start())
    with pytest.raises(ProtocolError, match="65535 bytes"):
        a.receive(b"\xff\xff")


def test_a_server_that_does_not_wait_for_the_proof_is_refused():
    with pytest.raises(ProtocolError, match="after the hello"):
        client().receive(Server(SECRET, BEN).start() + b"x")


def test_at_most_one_message_is_buffered():
    b = Server(SECRET, BEN)
    b.receive(MAX_MESSAGE_BYTES.to_bytes(2, "little"))
    for _ in range(MAX_MESSAGE_BYTES - 1):
        b.receive(b"x")
    assert len(b._buffer) <= MAX_MESSAGE_BYTES + 2
    with pytest.raises(AuthenticationError):
        b.receive(b"x")


def test_names_that_cannot_be_sent_are_refused_at_once():
    with pytest.raises(ProtocolError, match="name of 0 bytes"):
        Server(SECRET, Identity("", 0, 0))
    with pytest.raises(ProtocolError, match="name of 256 bytes"):
        client(expected="x" * 256)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_changed_byte_goes_unnoticed(data):
    """One bit of the whole dialogue flipped.

    One of the two refuses, and neither is done with a wrong peer.
    """
    a = client()
    b = Server(SECRET, BEN)
    turn = data.draw(st.integers(0, 2))
    flip = lambda message: _flipped(message, data.draw(st.integers(0, 8 * len(message) - 1)))  # noqa: E731
    try:
        hello = flip(b.start()) if turn == 0 else b.start()
        proof = a.receive(hello)
        proof = flip(proof) if turn == 1 else proof
        reply = b.receive(proof)
        reply = flip(reply) if turn == 2 else reply
        a.receive(reply)
    except (AuthenticationError, ProtocolError):
        pass
    assert not (a.done and b.done)


def _flipped(message, bit):
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=600), max_size=5), st.booleans())
def test_any_bytes_give_a_named_error_or_nothing(chunks, greeted):
    for side in (client(), Server(SECRET, BEN)):
        if greeted and isinstance(side, Client):
            side.receive(Server(SECRET, BEN).start())
        try:
            for chunk in chunks:
                side.receive(chunk)
        except (AuthenticationError, ProtocolError):
            continue
        assert not side.done and len(side._buffer) <= MAX_MESSAGE_BYTES + 2
