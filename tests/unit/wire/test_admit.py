"""Who may knock at a Unix socket, and how much is written about it."""

import functools
import gc
import logging
import os
import secrets
import socket
import time
import weakref

import pytest

from pibroch.wire import admit
from pibroch.wire.admit import Listener
from pibroch.wire.bounded_log import BoundedLog
from pibroch.wire.handshake import Server
from pibroch.wire.handshake_messages import Identity
from pibroch.wire.reactor import Reactor

NOBODY = 65534
TIMEOUT_S = 20


@pytest.fixture
def reactor():
    made = Reactor("test-admit")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def name():
    return f"pibroch-test-{secrets.token_hex(8)}"


def listening(name, queue=16):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind("\0" + name)
    sock.listen(queue)
    return sock


def as_nobody(function):
    """The exit code of ``function()`` in a process of another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os._exit(function())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def greeted(name):
    """Whether a worker says hello to who knocks."""
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.settimeout(TIMEOUT_S)
        knocking.connect("\0" + name)
        try:
            return bool(knocking.recv(4096))
        except ConnectionResetError:
            return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can be another user")
def test_another_user_of_this_machine_is_turned_away_before_anything_is_said(
    reactor, name, monkeypatch, caplog
):
    monkeypatch.setattr(admit, "_other_users_log", BoundedLog(admit.log, at_once=3, per_s=1e-9))
    sock = listening(name)
    make_core = functools.partial(Server, b"a secret of sixteen bytes", Identity("me", 0, 1))
    with caplog.at_level(logging.DEBUG, logger="pibroch.wire.admit"):
        Listener(
            reactor,
            sock,
            make_core,
            lambda *_: None,
            max_strangers=4,
            handshake_s=5,
            lost_after_s=4,
        )
        assert greeted(name)
        for _ in range(20):
            assert as_nobody(lambda: int(greeted(name))) == 0
        assert greeted(name)
    lines = [each for each in caplog.records if "another user" in each.getMessage()]
    assert len(lines) == 3


def test_lines_come_at_a_bounded_rate():
    lines = BoundedLog(logging.getLogger(), at_once=5, per_s=2)
    assert sum(lines.take(100.0) for _ in range(1000)) == 5 and lines.num_dropped == 995
    assert sum(lines.take(101.0) for _ in range(1000)) == 2
    assert sum(lines.take(200.0) for _ in range(1000)) == 5


def test_a_handshake_that_is_over_is_gone_before_its_time_runs_out(reactor, name):
    """Else who knocks fast enough would fill memory, as each would stay for ``handshake_s``."""
    cores = []

    def make_core():
        core = Server(b"a secret of sixteen bytes", Identity("me", 0, 1))
        cores.append(weakref.ref(core))
        return core

    gc.disable()
    try:
        Listener(
            reactor,
            listening(name),
            make_core,
            lambda *_: None,
            max_strangers=4,
            handshake_s=3600,
            lost_after_s=4,
        )
        assert all(greeted(name) for _ in range(21))
        deadline = time.monotonic() + TIMEOUT_S
        while any(core() is not None for core in cores[:20]) and time.monotonic() < deadline:
            time.sleep(0.001)  # until all departures but the last were seen
    finally:
        gc.enable()
    assert [core() for core in cores[:20]] == [None] * 20
