"""Whoever knocks, at every listener that there is: unproved, damaged or slow, nobody gets in.

Workers of every role, ranks (lag, retrieve, mailboxes, the failure detector) and hosts that serve
rows let others in by one listener; none of them is held up for half a second meanwhile.
"""

import os
import random
import resource
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest
from mutations import mutations

from pibroch import rpc
from pibroch.ports import free_port
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.rows import RowWorker
from pibroch.rpc.transport.frames import Kind, header
from pibroch.rpc.values.messages import encode
from pibroch.serve.parts import WantedRows, by_ids
from pibroch.wire.handshake import Client
from pibroch.wire.handshake_messages import MAGIC, Identity, Purpose, ReplyCode
from pibroch.wire.ranks import admit_streams, introduce
from pibroch.wire.sockets import listen

SECRET = b"the secret of this test alone, 32"
STRANGE = b"the secret of another job, also 3"
FRAMES = int(os.environ.get("PIBROCH_SOAK_FRAMES", "1500"))
"""Damaged handshakes at each listener."""
NUM_SLOW = max(100, int(os.environ.get("PIBROCH_SOAK_CONNECTIONS", "0")))
"""Connections that are slow at the same time."""
HELD_UP_S = 0.5
THESE = encode(WantedRows("these"))
TIMEOUT_S = 60.0


@dataclass
class Listening:
    """A listener.

    Attributes:
        address: of TCP, or a Unix socket's.
        name: that who knocks has to know.
        greet: a friend comes in; fails where it cannot.
    """

    address: object
    name: str
    greet: object

    def connect(self):
        family = socket.AF_INET if isinstance(self.address, tuple) else socket.AF_UNIX
        link = socket.socket(family)
        link.settimeout(TIMEOUT_S)
        while True:
            try:
                link.connect(self.address)
                return link
            except BlockingIOError:  # a Unix socket's queue is full for a moment
                time.sleep(0.001)


@contextmanager
def ranks(is_unix):
    with socket.socket(socket.AF_UNIX) if is_unix else listen() as server:
        if is_unix:
            server.bind(f"\0pibroch-test-{random.getrandbits(62)}")
            server.listen(512)
        links = {}
        until = time.monotonic() + 10 * TIMEOUT_S
        waiting = threading.Thread(
            target=lambda: links.update(admit_streams([server], SECRET, 0, [(1, 0)], until))
        )
        waiting.start()
        address = server.getsockname()

        def greet():
            with here.connect() as link:
                introduce(link, SECRET, 1, 0)
                waiting.join(TIMEOUT_S)
                assert set(links) == {(1, 0)}
                links[1, 0].close()

        here = Listening(address, f"rank 0 at {address!r}", greet)
        yield here


@contextmanager
def worker(is_unix):
    options = rpc.RpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{free_port()}", secret=SECRET, num_worker_threads=2
    )
    rpc.init_rpc("ann", rank=0, world_size=1, rpc_backend_options=options)
    record = current_agent().record
    address = f"\0{record.unix}" if is_unix else (record.host, record.port)

    def greet():
        with here.connect() as link:
            assert proved(link, SECRET, "ann")

    here = Listening(address, "ann", greet)
    try:
        yield here
    finally:
        rpc.shutdown(graceful=False)


@contextmanager
def rows():
    me = WorkerInfo("rows:1-of-1", 1)
    giving = RowWorker(me, SECRET, {}, by_ids(lambda of, ids: ids + 1), ("127.0.0.1", 0))
    giving.start()
    place = {me: ("127.0.0.1", giving.port)}
    reading = RowWorker(WorkerInfo("rows:scoring", 2), SECRET, place)

    def greet():
        ids = np.arange(3)
        answer = reading.read(me, THESE, [ids], HELD_UP_S).result(TIMEOUT_S)
        assert np.array_equal(answer.view(np.int64), ids + 1)

    try:
        yield Listening(place[me], me.name, greet)
    finally:
        reading.close()
        giving.close()


LISTENERS = {
    "ranks, TCP": lambda: ranks(False),
    "ranks, Unix": lambda: ranks(True),
    "worker, TCP": lambda: worker(False),
    "worker, Unix": lambda: worker(True),
    "rows of hosts": rows,
}


@pytest.fixture(params=LISTENERS)
def listener(request, monkeypatch):
    for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with LISTENERS[request.param]() as here:
        yield here


def hello_of(link):
    """The first message."""
    hello = b""
    while len(hello) < 44:
        data = link.recv(44 - len(hello))
        assert data, "no hello"
        hello += data
    return hello


def side_of(secret, name):
    return Client(secret, Identity("eve", 66, 1), name, Purpose(random.getrandbits(62)))


def proved(link, secret, name):
    """Whether a client with a secret is let in."""
    side = side_of(secret, name)
    link.sendall(side.receive(hello_of(link)))
    return reply_of(link) == ReplyCode.ACCEPTED


def reply_of(link):
    """The code of the reply, ``None`` for a connection that is closed without."""
    reply = b""
    with suppress(ConnectionError):
        while len(reply) < 3 and (data := link.recv(4096)):
            reply += data
    return reply[2] if len(reply) > 2 else None


def damaged(proof, chance):
    """A proof with something changed, cut off, or made up."""
    words = bytearray(proof)
    kind = chance.randrange(6)
    if kind == 0:
        for _ in range(chance.randrange(1, 4)):
            words[chance.randrange(2, len(words))] ^= 1 << chance.randrange(8)
        return bytes(words) if bytes(words) != proof else proof[:-1]
    if kind == 1:
        return proof[: chance.randrange(len(proof))]
    if kind == 2:
        return chance.randbytes(chance.randrange(1, 2000))
    if kind == 3:
        words[:2] = chance.randrange(1 << 16).to_bytes(2, "little")
        return bytes(words) if bytes(words) != proof else b""
    if kind == 4:
        return MAGIC + proof
    return proof[:2] + bytes(len(proof) - 2)


@contextmanager
def watched(listener):
    """Meanwhile somebody knocks again and again, and is greeted in time."""
    is_over = threading.Event()
    slow = []

    def knock():
        while not is_over.is_set():
            begun = time.monotonic()
            with suppress(ConnectionError), listener.connect() as link:
                hello_of(link)
            slow.append(time.monotonic() - begun)
            is_over.wait(0.005)

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        yield
    finally:
        is_over.set()
        knocking.join(TIMEOUT_S)
    assert slow and max(slow) < HELD_UP_S


def test_nobody_without_the_secret_gets_in(listener):
    chance = random.Random(7)
    codes = set()
    before = b""
    with watched(listener):
        for number in range(FRAMES):
            with listener.connect() as link:
                side = side_of(SECRET, listener.name)
                proof = side.receive(hello_of(link))
                words = damaged(proof, chance)
                if number % 7 == 0:
                    words = before or words  # what was right on another connection
                before = proof
                with suppress(ConnectionError):
                    link.sendall(words)
                    link.shutdown(socket.SHUT_WR)
                codes.add(reply_of(link))
        with listener.connect() as link:
            assert not proved(link, STRANGE, listener.name)
    assert ReplyCode.ACCEPTED not in codes and ReplyCode.WRONG_SECRET in codes
    listener.greet()


@pytest.fixture
def many_files():
    """As many files may be open as both ends of all connections are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * NUM_SLOW)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_is_slow_holds_up_nobody(many_files, listener):
    """More connections than may wait, some of which send a byte now and then.

    They take no threads, and memory within bounds.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_threads = threading.active_count()
    slow = [listener.connect() for _ in range(NUM_SLOW)]
    assert threading.active_count() <= num_threads + 2
    with watched(listener):
        for _ in range(5):
            for link in slow[::3]:
                with suppress(OSError):
                    link.send(b"\x60")
            time.sleep(0.02)
    listener.greet()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10  # KiB
    for link in slow:
        link.close()


def test_who_has_the_secret_can_ask_for_rows_and_break_nothing(monkeypatch):
    """Damaged frames behind a handshake that was right."""
    ids = np.arange(3)
    right = header(Kind.REQUEST, 5, len(THESE), ids.nbytes) + THESE + ids.tobytes()
    with rows() as listener, watched(listener):
        link = None
        for frame in mutations([right], FRAMES):
            if link is None:
                link = listener.connect()
                assert proved(link, SECRET, listener.name)
                link.setblocking(False)
            try:
                link.sendall(frame)
                while link.recv(1 << 16):
                    pass
                link = link.close()
            except BlockingIOError:
                pass
            except OSError:
                link = link.close()
        if link is not None:
            link.close()
        listener.greet()
