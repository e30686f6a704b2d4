"""Connections that ask nothing, never end, are never read or are too many.

Each is closed in time, and others are answered.
"""

import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from certificates import authority, signed
from pibroch.serve.export import export_checkpoint
from served import serving, until

SOAK = int(os.environ.get("PIBROCH_SOAK_CONNECTIONS", "0"))
"""Connections that do nothing good while health is asked for; 2000 is the whole measurement."""
READY = b"GET /v2/health/ready HTTP/1.1\r\nhost: a\r\n\r\n"
SCORE = b"POST /score HTTP/1.1\r\nhost: a\r\n"
WITHIN_S = 20
"""For what takes half a second on a quiet machine."""


@pytest.fixture(scope="module")
def export(clicks, tmp_path_factory):
    """An export, ``.path``, and ``.row`` for it."""
    folder = tmp_path_factory.mktemp("served") / "ctr"
    export_checkpoint(clicks.run, folder)
    return SimpleNamespace(path=folder, row=clicks.rows[0])


@pytest.fixture(scope="module")
def hasty(export):
    """A server that waits for half a second, whatever for."""
    times = [(f"--{name}-timeout", 0.5) for name in ("body", "idle", "write")]
    with serving(export.path, *(each for pair in times for each in pair)) as server:
        yield server


def opened(server, *sent):
    client = socket.socket()
    client.settimeout(WITHIN_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.address)
    for each in sent:
        client.sendall(each)
    return client


def received_from(client, again=b""):
    """All that comes until the server closes, while these bytes are sent now and then."""
    received = b""
    deadline = time.monotonic() + WITHIN_S
    client.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            if again:
                client.sendall(again)
            some = client.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError:
            return received
        if not some:
            return received
        received += some
    raise AssertionError(f"still open: {received[-300:]}")


def embedded(row, count=8000):
    """A request for some megabytes."""
    body = json.dumps({"columns": {name: [value] * count for name, value in row.items()}}).encode()
    return b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def scored(body, *headers):
    lines = b"".join(b"%s\r\n" % header for header in headers)
    return b"%scontent-length: %d\r\n%s\r\n%s" % (SCORE, len(body), lines, body)


ENDLESS = {
    "silence": (READY, b"", [b"200"]),
    "newlines": (READY, b"\r\n", [b"200"]),
    "the rest of a refused body": (SCORE + b"content-length: 999999999\r\n\r\n", b"x", [b"413"]),
    "the rest of a body of no endpoint": (
        b"POST /other HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n",
        b"x",
        [b"404"],
    ),
    "a second head": (READY + b"GET /v2", b"x", [b"200", b"408"]),
    "a head": (b"GET /v2 HTTP/1.1\r\n", b"x: y\r\n", [b"408"]),
    "trailers": (
        SCORE + b"transfer-encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n",
        b"x: y\r\n",
        [b"408"],
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_no_byte_keeps_a_connection_open(hasty, case):
    sent, again, statuses = ENDLESS[case]
    with opened(hasty, sent) as client:
        received = received_from(client, again)
    for line, status in zip(
        [line for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1")],
        statuses,
        strict=False,
    ):
        assert status in line, received
    assert received.startswith((b"HTTP/1.1 " + statuses[0], b"HTTP/1.1 " + statuses[-1]))


def test_trailers_are_bounded_as_heads_are(hasty):
    """A server takes them apart into headers that nobody reads."""
    with opened(hasty, SCORE + b"transfer-encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n") as client:
        line = b"x-y: " + b"z" * 1000 + b"\r\n"
        with pytest.raises(OSError):
            for _ in range(100_000):
                client.sendall(line)


def test_answers_that_nobody_reads(export, hasty):
    """The connection, and the bytes for it, are given up."""
    with opened(hasty, embedded(export.row)):
        until(lambda: hasty.metric("pibroch_connections_open") == 1, WITHIN_S)
        assert hasty.metric("pibroch_bytes_open") == 0
        assert hasty.metric("pibroch_requests_open") == 1


def test_a_head_is_bounded_to_the_byte(hasty):
    start = b"GET /v2 HTTP/1.1\r\nhost: a\r\nx: "
    end = b"\r\nconnection: close\r\n\r\n"
    for length, status in ((65_000, b"200"), (66_000, b"431"), (80_000, b"431"), (300_000, b"431")):
        with opened(hasty) as client:
            client.sendall(start + b"x" * length + end)
            received = received_from(client)
        assert received.startswith(b"HTTP/1.1 " + status), (length, received[:200])
    many = b"GET /v2 HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 2000 + b"\r\n\r\n"
    with opened(hasty, many * 60 + b"GET /v2") as client:  # many are no long one
        assert b"HTTP/1.1 431" not in received_from(client)


def test_requests_before_an_answer_are_bounded(hasty):
    with opened(hasty, READY * 5000) as client:
        received = received_from(client)
    assert 1 <= received.count(b"HTTP/1.1 200") <= 66 and received.count(b"HTTP/1.1 429") == 1
    assert received.rindex(b"HTTP/1.1 200") < received.index(b"HTTP/1.1 429")


def test_an_upgrade_that_is_not_taken_loses_nothing(export, hasty):
    """As Java's client asks: the body is read, and so is the next request of the packet."""
    body = json.dumps([export.row]).encode()
    wants = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABk")
    first = scored(body, *wants)
    with opened(
        hasty, first + first + READY + READY.replace(b"host", b"connection: close\r\nhost")
    ) as client:
        received = received_from(client)
    assert received.count(b"HTTP/1.1 200") == 4 and received.count(b'"scores"') == 2, received
    chunked = SCORE + b"connection: upgrade\r\nupgrade: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with opened(hasty, chunked) as client:
        client.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert received_from(client).startswith(b"HTTP/1.1 200")
    with opened(hasty, b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n") as client:
        assert received_from(client).startswith(b"HTTP/1.1 405")


def test_an_answer_is_one_packet(export, hasty):
    """A client that wakes up for a head alone waits once more."""
    body = json.dumps([export.row]).encode()
    with opened(hasty) as client:
        for _ in range(20):
            client.sendall(scored(body))
            answer = client.recv(1 << 16)
            head, _, scores = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and json.loads(scores)["scores"], answer
        client.sendall(READY.replace(b"GET", b"HEAD"))
        assert client.recv(1 << 16).endswith(b"\r\n\r\n")
        waits = scored(body, b"expect: 100-continue")
        client.sendall(waits[: -len(body)])
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_what_is_wrong_is_answered_behind_what_is_right(export):
    """The first request waits for others when the second one of the packet cannot be read."""
    with serving(export.path, "--batch-delay-ms", 300, "--body-timeout", 0.1) as server:
        right = scored(json.dumps([export.row]).encode())
        for wrong, status in ((b"\x00\x01", b"400"), (b"GET /v2 HTTP/1.1\r\nx: ", b"408")):
            with opened(server, right + wrong) as client:
                received = received_from(client)
            assert received.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 " + status in received
        with opened(server, right + b"GET /v2 HTTP/1.1\r\n" + b"x: y\r\n" * 12_000) as client:
            received = received_from(client)
        assert received.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 431" in received


def test_there_is_room_for_those_who_ask(export):
    """At the bound, the connection that has been idle for longest makes room.

    Where none is idle, the new one is refused.
    """
    options = ("--max-connections", 4, "--batch-delay-ms", 1000)
    with serving(export.path, *options) as server, ExitStack() as stack:
        halves = (b"", b"GET /v2", SCORE + b"content-length: 9\r\n\r\n{")
        idle = [stack.enter_context(opened(server, halves[number % 3])) for number in range(12)]
        for _ in range(5):
            assert server.ask("GET", "/v2/health/ready").status == 200
        assert server.metric("pibroch_connections_open") <= 4
        assert all(received_from(client) == b"" for client in idle[:8])
        request = scored(json.dumps([export.row]).encode())
        busy = [stack.enter_context(opened(server, request)) for _ in range(4)]
        refused = received_from(opened(server))
        assert refused.startswith(b"HTTP/1.1 503") and b"more than 4 connections" in refused
        assert all(client.recv(1 << 16).startswith(b"HTTP/1.1 200") for client in busy)
        assert server.ask("GET", "/v2/health/ready").status == 200
        assert "idle ones are closed" in server.complaints()


def test_bytes_under_way_are_bounded_together(export):
    options = ("--max-body-mb", 0.1, "--max-total-mb", 0.15, "--body-timeout", 60)
    with serving(export.path, *options) as server, ExitStack() as stack:
        part = SCORE + b"content-length: 70000\r\n\r\n" + b"[" * 60_000
        slow = [stack.enter_context(opened(server, part)) for _ in range(2)]
        until(lambda: server.metric("pibroch_bytes_open") == 120_000)
        assert server.ask("GET", "/v2/health/ready").status == 200
        assert server.ask("POST", "/score", [export.row]).status == 200
        refused = server.ask("POST", "/score", b" " * 40_000)
        assert refused.status == 503 and "120,000 under way" in refused.reason
        assert refused.headers["retry-after"] == "1"
        chunks = (b" " * 10_000 for _ in range(4))
        connection = server.connect()
        connection.request(
            "POST", "/score", chunks, encode_chunked=True, headers={"transfer-encoding": "chunked"}
        )
        assert connection.getresponse().status == 503
        connection.close()
        for client in slow:
            client.close()
        until(lambda: server.metric("pibroch_bytes_open") == 0)
        assert server.ask("POST", "/score", b" " * 40_000).status == 400


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
def test_the_end_comes_within_its_time(export, tmp_path, is_encrypted):
    """Whatever clients do that neither read nor send.

    Open requests are let end for a second, and no longer.
    """
    options = ["--shutdown-timeout", 1]
    context = None
    if is_encrypted:
        by = authority(tmp_path, "authority")
        certificate, key, _ = signed(tmp_path, "server", by)
        options += ["--tls-cert", certificate, "--tls-key", key]
        context = ssl.create_default_context(cafile=by[1])
        context.check_hostname = False
    with serving(export.path, *options, tls=context) as server, ExitStack() as stack:

        def opened_here():
            client = stack.enter_context(opened(server))
            return client if context is None else stack.enter_context(context.wrap_socket(client))

        unread = opened_here()
        half = opened_here()
        half.sendall(SCORE + b"content-length: 100\r\n\r\n{")
        stack.enter_context(opened(server))  # not even a handshake
        unread.sendall(embedded(export.row))
        until(lambda: server.metric("pibroch_bytes_open") > 1)
        begun = time.monotonic()
        server.end()
        assert time.monotonic() - begun < 10


def test_a_handshake_that_does_not_come_to_its_end(export, tmp_path):
    by = authority(tmp_path, "authority")
    certificate, key, _ = signed(tmp_path, "server", by)
    context = ssl.create_default_context(cafile=by[1])
    context.check_hostname = False
    options = (
        "--tls-cert",
        certificate,
        "--tls-key",
        key,
        "--body-timeout",
        0.5,
        "--max-connections",
        4,
    )
    with serving(export.path, *options, tls=context) as server, ExitStack() as stack:
        for sent in (b"", b"\x16\x03\x01\x02\x00", READY):
            with opened(server, sent) as client:
                received_from(client)
        for _ in range(9):
            stack.enter_context(opened(server))
        assert server.ask("GET", "/v2/health/ready").status == 200
        assert server.metric("pibroch_connections_open") <= 4


def test_health_beside_connections_that_do_nothing_good(export):
    """20 of 20 checks within a second each, beside idle, slow and unread connections.

    Below their bound and above it.
    """
    count = SOAK or 120
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 500)), hard))
    slow = SCORE + b"content-length: 50000\r\n\r\n["
    unread = embedded(export.row, 1000)
    kinds = (b"", READY, READY * 60, b"GET /v2/hea", slow, unread)
    times = [each for name in ("body", "idle", "write") for each in (f"--{name}-timeout", 300)]
    for most in (2 * count, count // 2):
        options = ("--max-connections", most, *times)
        with serving(export.path, *options) as server, ExitStack() as stack:
            for number in range(count):
                client = stack.enter_context(opened(server))
                client.settimeout(0)
                try:
                    client.send(kinds[number % len(kinds)])
                except OSError:  # it was closed, or takes no more
                    continue
            # what they ask is answered by then
            num_open = server.metric("pibroch_connections_open")
            assert count <= num_open <= count + 2 if most > count else num_open <= most
            seconds = []
            for _ in range(20):
                begun = time.monotonic()
                assert server.ask("GET", "/v2/health/ready").status == 200
                seconds.append(time.monotonic() - begun)
            assert max(seconds) < (1 if SOAK else 5), seconds
            print(f"{count} connections, at most {most}: 20 checks in at most {max(seconds):.3f} s")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_heads_of_health_and_of_all_that_can_be_got(hasty):
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/ctr/ready",
        "/v2",
        "/v2/models/ctr",
        "/metrics",
        "/docs",
    ):
        response = hasty.ask("HEAD", path)
        got = hasty.ask("GET", path)
        assert response.status == got.status == 200 and response.body == b"", path
        assert path == "/metrics" or response.headers["content-length"] == str(len(got.body))
    missing = hasty.ask("HEAD", "/score")
    assert missing.status == 405 and missing.headers["allow"] == "POST"
    pages = hasty.ask("GET", "/openapi.json").json["paths"]
    assert set(pages["/v2/health/ready"]) == {"get"}


def test_an_encoding_that_is_not_taken_is_answered_with_those_that_are(hasty):
    refused = hasty.ask("POST", "/score", b"x", {"content-encoding": "br"})
    assert refused.status == 415 and refused.headers["accept-encoding"] == "gzip, deflate"


LIMITS = """
import resource
from pibroch.serve.server import num_connections
for most in (100, 1000, 5000):
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, 2000))
    print(num_connections(most), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_descriptors_for_as_many_connections_as_are_wanted():
    """The limit on open files is raised as far as it may be.

    Where that is too little, fewer connections are taken.
    """
    ran = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, timeout=100
    )
    assert ran.stdout.splitlines() == ["100 500", "1000 1256", "1744 2000"], ran.stderr
    assert "only 2000 files may be open" in ran.stderr
