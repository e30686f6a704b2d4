"""Dialling on a real loop and real sockets.

Who closes early is dialled again, who is not there is not.
"""

import errno
import secrets
import socket
import ssl
import threading

import pytest

from pibroch.errors import AuthenticationError
from pibroch.wire import dialling
from pibroch.wire.admit import Address, Admission, dial
from pibroch.wire.dialling import Dialling, is_final
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import Identity, Purpose
from pibroch.wire.reactor import Reactor

TIMEOUT_S = 30.0
SECRET = b"a secret of this test alone"


@pytest.fixture
def loop():
    made = Reactor("test-dialling")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(TIMEOUT_S)
        yield made


class Outcome:
    """Dials, and waits for what comes of it."""

    def __init__(self, loop, port, is_wanted=lambda: True, unix=None):
        self._done = threading.Event()
        self.admitted = None
        self.error = None
        address = Address("elsewhere" if unix is None else "here", unix, "127.0.0.1", port)
        start = Dialling(
            loop,
            lambda: dial(address, "here", 1.0),
            lambda: Client(SECRET, Identity("ann", 1, 1), "ben", Purpose(1)),
            lambda sock, core: self._end(admitted=sock),
            lambda error: self._end(error=error),
            is_wanted,
            1.0,
        ).start
        loop.call_soon(start)

    def _end(self, **what):
        vars(self).update(what)
        self._done.set()

    @property
    def is_over(self):
        return self._done.is_set()

    def wait(self):
        assert self._done.wait(TIMEOUT_S)
        return self


def admit(listener):
    sock, _ = listener.accept()
    core = Server(SECRET, Identity("ben", 2, 2))
    sock.sendall(core.start())
    while not core.done:
        sock.sendall(core.receive(sock.recv(4096)))
    return sock


def test_who_closes_before_it_admits_is_dialled_again(loop, listener):
    outcome = Outcome(loop, listener.getsockname()[1])
    for _ in range(3):
        listener.accept()[0].close()
    with admit(listener):
        assert outcome.wait().error is None
        outcome.admitted.close()


def test_who_is_silent_is_waited_for(loop, listener):
    """For longer than a host may take to be reached."""
    outcome = Outcome(loop, listener.getsockname()[1])
    first, _ = listener.accept()
    expired = threading.Event()
    # behind the time to be connected
    loop.call_soon(lambda: loop.call_at(dialling.time.monotonic() + 1.2, expired.set))
    assert expired.wait(TIMEOUT_S) and outcome.error is None
    core = Server(SECRET, Identity("ben", 2, 2))
    with first:
        first.sendall(core.start())
        while not core.done:
            first.sendall(core.receive(first.recv(4096)))
        assert outcome.wait().error is None
        outcome.admitted.close()


class LateLoop:
    """A loop that has no time for sockets, only for timers."""

    def __init__(self):
        self.timers = []

    def call_at(self, when, function):
        self.timers.append(function)

    def watch(self, *_):
        pass

    forget = watch


def test_a_loop_that_is_late_does_not_take_a_connection_for_none(listener):
    loop = LateLoop()
    refused = []
    sock = socket.create_connection(listener.getsockname())
    core = Client(SECRET, Identity("ann", 1, 1), "ben", Purpose(1))
    admission = Admission(loop, sock, core, 1.0, lambda sock: None, refused.append)
    loop.timers.pop()()
    assert refused == []
    admission.refuse(ConnectionError("over"))


def test_who_closes_for_too_long_is_given_up(loop, listener, monkeypatch):
    monkeypatch.setattr(dialling, "CLOSED_FOR_S", 0.0)
    outcome = Outcome(loop, listener.getsockname()[1])
    listener.accept()[0].close()
    assert isinstance(outcome.wait().error, ConnectionError)


def test_nobody_dials_when_nobody_wants_it_any_more(loop, listener):
    wanted = [True]
    outcome = Outcome(loop, listener.getsockname()[1], lambda: wanted[0])
    sock, _ = listener.accept()
    wanted[0] = False
    sock.close()
    listener.settimeout(0.3)
    with pytest.raises(TimeoutError):
        listener.accept()
    assert outcome.error is None


def test_a_full_queue_is_tried_again(loop):
    name = f"pibroch-test-{secrets.token_hex(8)}"
    waiting = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(1)
        while True:  # others fill the queue
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            if waiting[-1].connect_ex("\0" + name) == errno.EAGAIN:
                break
        outcome = Outcome(loop, 0, unix=name)
        tried_again = threading.Event()
        loop.call_soon(lambda: loop.call_at(dialling.time.monotonic() + 0.2, tried_again.set))
        assert tried_again.wait(TIMEOUT_S) and not outcome.is_over
        listener.settimeout(TIMEOUT_S)
        for _ in waiting[:-1]:
            listener.accept()[0].close()
        with admit(listener):
            assert outcome.wait().error is None
            outcome.admitted.close()
    for each in waiting:
        each.close()


def test_where_nobody_listens_it_is_over_at_once(loop):
    missing = Outcome(loop, 0, unix=f"pibroch-test-{secrets.token_hex(8)}")
    assert isinstance(missing.wait().error, ConnectionRefusedError)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert isinstance(Outcome(loop, port).wait().error, ConnectionRefusedError)


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ConnectionError("the other side closed the connection during the handshake"), False),
        (ConnectionResetError(104, "reset"), False),
        (BlockingIOError(11, "the queue is full"), False),
        (ConnectionRefusedError(111, "refused"), True),
        (FileNotFoundError(2, "no such socket"), True),
        (TimeoutError("no connection in time"), True),
        (OSError(113, "no route"), True),
        (ssl.SSLError("unknown authority"), True),
        (AuthenticationError("another secret"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_errors_are_final(error, final):
    assert is_final(error) is final
