"""Who is let in as a rank, over real sockets and torch's own store.

A stranger reads and writes all that is in the store.
"""

import json
import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import pairwise

import pytest

from forked import context
from pibroch.collectives.world import world_of_environment
from pibroch.errors import AuthenticationError, ConfigError, PibrochError
from pibroch.host import is_loopback, is_one_machine
from pibroch.ports import free_port
from pibroch.stores import tcp_store
from pibroch.wire import ranks
from pibroch.wire.handshake_messages import IDLE
from pibroch.wire.ranks import admit_streams, agreed_key, introduce, key_of_run, published_key
from pibroch.wire.rendezvous import rendezvous
from pibroch.wire.sockets import listen

KEY = b"the key of this run alone, 32 by"
TIMEOUT_S = 60.0
SECRET = "a secret of this test alone"


@pytest.fixture
def alone(monkeypatch):
    """No launcher has said anything."""
    for name in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "PIBROCH_RPC_SECRET"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def server(alone):
    with listen() as server:
        yield server


def admitted(server, *ranks):
    expected = [(rank, 0) for rank in ranks]
    links = admit_streams([server], KEY, 0, expected, time.monotonic() + TIMEOUT_S)
    return {rank: link for (rank, _), link in links.items()}


def call(address, key=KEY, rank=1, other=0):
    link = socket.create_connection(address, TIMEOUT_S)
    try:
        introduce(link, key, rank, other)
    except BaseException:
        link.close()
        raise
    return link


def test_strangers_are_turned_away_and_hold_up_nobody(server, threads, monkeypatch):
    monkeypatch.setattr(ranks, "HELLO_TIMEOUT_S", 4 * TIMEOUT_S)
    links = threads.submit(admitted, server, 1)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(server.getsockname()))
            for _ in range(ranks.MOST_CALLERS + 40)
        ]
        silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent[-2].sendall(b"\xff\xff" + bytes(3000))
        with pytest.raises((PibrochError, OSError)):
            call(server.getsockname(), bytes(32))
        stack.enter_context(call(server.getsockname(), rank=5))
        friend = stack.enter_context(call(server.getsockname()))
        (rank, link), *others = links.result(TIMEOUT_S).items()
        assert rank == 1 and not others
        with closing(link):
            friend.sendall(b"x")
            assert link.recv(1) == b"x"
        silent[0].settimeout(TIMEOUT_S)
        assert silent[0].recv(1 << 10).startswith(b"\x89PBRPC") and silent[0].recv(1) == b""


def test_what_follows_the_handshake_stays_in_the_socket(server, threads):
    def greet():
        link = admitted(server, 1)[1]
        link.sendall(b"at once")
        return link

    other = threads.submit(greet)
    with call(server.getsockname()) as link, other.result(TIMEOUT_S):
        assert link.recv(7, socket.MSG_WAITALL) == b"at once"


def test_ranks_come_in_where_there_is_no_epoll(server, threads, monkeypatch):
    monkeypatch.delattr(select, "epoll")
    monkeypatch.delattr(os, "eventfd")
    links = threads.submit(admitted, server, 1, 2)
    with pytest.raises((PibrochError, OSError)):
        call(server.getsockname(), bytes(32))
    with call(server.getsockname()) as friend, call(server.getsockname(), rank=2):
        first, second = (links.result(TIMEOUT_S)[rank] for rank in (1, 2))
        with closing(first), closing(second):
            friend.sendall(b"x")
            assert first.recv(1) == b"x"


def test_absent_ranks_are_named(server):
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come"):
        admit_streams([server], KEY, 0, [(1, 0), (2, 0)], time.monotonic() + 0.05)


def test_nobody_else_can_be_called(server, threads):
    with ThreadPoolExecutor(1) as pool, listen() as other_rank:
        for impostor in ([server], bytes(32), 0), ([other_rank], KEY, 2):
            gone = pool.submit(admit_streams, *impostor, [(1, 0)], time.monotonic() + 1.0)
            with pytest.raises(AuthenticationError):
                call(impostor[0][0].getsockname())
            assert isinstance(gone.exception(TIMEOUT_S), TimeoutError)


def test_a_proof_that_is_passed_on_is_worth_nothing(server, threads):
    """Who can write to the store gives its own address out as rank 0's, and hands all bytes on."""
    gone = threads.submit(admit_streams, [server], KEY, 0, [(1, 0)], time.monotonic() + 2.0)
    with listen() as between:

        def hand_on():
            with (
                between.accept()[0] as client,
                socket.create_connection(server.getsockname()) as onwards,
            ):
                ways = [(client, onwards), (onwards, client)]
                backwards = threading.Thread(target=copy, args=ways[1])
                backwards.start()
                copy(*ways[0])
                backwards.join(TIMEOUT_S)

        def copy(source, target):
            with suppress(OSError):  # one end has hung up
                while data := source.recv(1 << 10):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        threads.submit(hand_on)
        with pytest.raises(AuthenticationError, match="at the address of"):
            call(between.getsockname())
    assert isinstance(gone.exception(TIMEOUT_S), TimeoutError)


def test_where_the_key_comes_from(alone, caplog):
    local = key_of_run()
    assert local == key_of_run() and len(local) == 32
    alone.setenv("TORCHELASTIC_RUN_ID", "another")
    assert key_of_run() not in (None, local)
    alone.setenv("MASTER_ADDR", "10.9.8.7")
    alone.setenv("WORLD_SIZE", "4")
    alone.setenv("LOCAL_WORLD_SIZE", "2")
    ranks._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "pibroch"):
        assert key_of_run() is None and key_of_run() is None
    assert [r.getMessage().count("PIBROCH_RPC_SECRET") for r in caplog.records] == [1]
    alone.setenv("PIBROCH_RPC_SECRET", SECRET)
    secret = key_of_run()
    assert secret not in (None, local) and SECRET.encode() not in secret
    assert agreed_key(secret, published_key(secret)) == secret and published_key(secret) == ""
    assert len(agreed_key(None, published_key(None))) == 32
    with pytest.raises(ConfigError, match="without a secret, where rank 0 has one"):
        agreed_key(None, published_key(secret))


def test_one_machine(alone):
    assert is_one_machine()
    alone.setenv("MASTER_ADDR", "node7")
    assert not is_one_machine()
    alone.setenv("WORLD_SIZE", "2")
    alone.setenv("LOCAL_WORLD_SIZE", "2")
    assert is_one_machine()
    names = ["localhost", "127.0.0.1", "127.3.2.1", "::1", "127.example.com", "10.0.0.1", ""]
    assert [is_loopback(name) for name in names] == [True] * 4 + [False] * 3


def strings_in(value):
    if isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings_in(each)
    else:
        yield str(value)


def all_of(store):
    """Every key and value of a store, and every part of a value."""
    for key in store.list_keys():
        value = store.get(key)
        yield from (key.encode(), value)
        try:
            parts = list(strings_in(json.loads(value)))
        except ValueError:
            continue
        for part in parts:
            yield part.encode()


@pytest.mark.parametrize("shares_memory", [True, False])
def test_what_is_in_the_store_lets_nobody_in(alone, threads, shares_memory):
    store = tcp_store("127.0.0.1", 0, is_host=True)
    first = threads.submit(rendezvous, store, 0, 2, TIMEOUT_S, shares_memory=shares_memory)
    stranger = tcp_store("127.0.0.1", store.port)
    stranger.wait(["key", "member0"])
    _, unix, host, port = json.loads(stranger.get("member0")).values()
    stranger.set("member1", stranger.get("member0"))
    for word in {*all_of(stranger), stranger.get("key").ljust(32, b"0")}:
        for key in {word, word[:32].ljust(32, b"\0")} - {b""}:
            for address in [(host, port), f"\0{unix}"][: 1 + shares_memory]:
                family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
                with socket.socket(family) as link:
                    link.settimeout(TIMEOUT_S)
                    link.connect(address)
                    with pytest.raises((AuthenticationError, OSError)):
                        introduce(link, key, 1, 0)
    assert not first.done()
    second = rendezvous(store, 1, 2, TIMEOUT_S, shares_memory=shares_memory)
    links = first.result(TIMEOUT_S)
    by_stream = {stream: set(links.remote[stream]) for stream in (0, IDLE)}
    if shares_memory:
        assert set(links.local) == {1} and by_stream == {0: set(), IDLE: set()}
    else:
        assert not links.local and by_stream == {0: {1}, IDLE: {1}}
    links.close()
    second.close()


def be_a_rank(rank, port, pipe):
    """Agents of torchrun that share no store count restarts each for itself."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(rank),
    }
    with world_of_environment():
        key = key_of_run()
        pipe.send([key, key.hex().encode()])
        pipe.recv()


def test_the_store_of_a_run_holds_nothing_secret(alone):
    port = free_port()
    pipes = []
    ranks = []
    alone.setenv("PIBROCH_RPC_SECRET", SECRET)
    for rank in range(2):
        ours, theirs = context().Pipe()
        ranks.append(context().Process(target=be_a_rank, args=(rank, port, theirs), daemon=True))
        ranks[-1].start()
        pipes.append(ours)
    secrets = [SECRET.encode()]
    for pipe in pipes:
        assert pipe.poll(TIMEOUT_S)
        secrets += pipe.recv()
    words = list(all_of(tcp_store("127.0.0.1", port)))
    assert len(words) > 4 and not [w for w in words if any(secret in w for secret in secrets)]
    assert all(not value for key, value in pairwise(words) if key.endswith(b"/key"))
    for pipe in pipes:
        pipe.send(None)
    for each in ranks:
        each.join(TIMEOUT_S)
    assert [each.exitcode for each in ranks] == [0, 0]
