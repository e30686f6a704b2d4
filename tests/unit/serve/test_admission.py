"""What passes before an endpoint is asked: schemes, slashes, and bodies that are compressed."""

import asyncio
import gzip
import json
import os
import tracemalloc
import zlib
from types import SimpleNamespace

import pytest

from pibroch.serve.admission import AdmissionControl
from pibroch.serve.endpoints import GET, POST, Endpoint, Reply
from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.settings import ServerLimits

LIMITS = ServerLimits(body_bytes=1 << 20, total_bytes=4 << 20)
TEXT = b'{"rows": [1, 2, 3]}' * 3000


async def echo(request):
    return Reply(request.body, ())


async def twice(request):
    return Reply(2 * request.body, ())


def asked(method, path, body=b"", limits=LIMITS, token=None, chunk=5000, **headers):
    """What one request is answered, and what is counted of it: the server's own ASGI."""
    endpoints = {
        name: Endpoint(methods, name, answer)
        for methods, name, answer in (
            (GET, "/v2", echo),
            (GET, "/v2/health/ready", echo),
            (GET, "/v2/models/{model}", echo),
            (POST, "/score", echo),
            (POST, "/twice", twice),
        )
    }
    connections = OpenConnections(limits)
    metrics = ServerMetrics()
    control = AdmissionControl(endpoints, metrics, token, connections)
    starts = range(0, max(1, len(body)), chunk)
    parts = [{"body": body[at : at + chunk], "more_body": at != starts[-1]} for at in starts]
    sent = []

    async def receive():
        return {"type": "http.request", **parts.pop(0)}

    async def send(message):
        sent.append(message)

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": method, "path": path, "headers": named}
    asyncio.run(control(scope, receive, send))
    assert connections.num_bytes == 0
    start, content = sent
    counted = metrics.text({}).decode()
    return SimpleNamespace(
        status=start["status"],
        headers=dict(start["headers"]),
        body=content["body"],
        reason=json.loads(content["body"])["error"] if start["status"] != 200 else "",
        metrics=counted,
    )


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_scheme_in_any_letters(scheme):
    assert asked("GET", "/v2", token="key-7", authorization=f"{scheme} key-7").status == 200
    assert asked("GET", "/v2", token="key-7", authorization=f"{scheme}  key-7 ").status == 200
    for wrong in (f"{scheme} key-77", f"{scheme}key-7", scheme, "key-7", "Basic key-7", " key-7"):
        assert asked("GET", "/v2", token="key-7", authorization=wrong).status == 401


def test_a_slash_at_the_end_of_a_path():
    for path in ("/v2", "/v2/models/ctr"):
        assert asked("GET", path).status == asked("GET", f"{path}/").status == 200
    assert asked("GET", "/v2/health/ready/", token="key").status == 200, "open without a token"
    counted = asked("POST", "/score/", b"x").metrics
    assert 'pibroch_requests_total{endpoint="score",status="200"} 1.0' in counted
    for path in ("/v2//", "/", "//score", "/v2/models/"):
        assert asked("GET", path).status == 404


def gzipped(body):
    """``body`` in gzip without the time of day, which would be in the test's name."""
    return gzip.compress(body, mtime=0)


def raw_deflate(body):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize("body", [b"", b"{}", TEXT, os.urandom(300_000)])
@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzipped), ("x-gzip", gzipped), ("Deflate", zlib.compress)],
)
def test_a_compressed_body_is_read_as_it_was(body, encoding, pack):
    answer = asked("POST", "/score", pack(body), content_encoding=encoding)
    assert (answer.status, answer.body) == (200, body)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "reason"),
    [
        ("br", b"x", 415, "got a body in br; need it as it is, or in one of gzip and deflate"),
        ("gzip, deflate", gzipped(b"{}"), 415, "gzip, deflate"),
        ("gzip", b"{}", 400, "no gzip"),
        ("gzip", b"", 400, "end too early"),
        ("gzip", gzipped(TEXT)[:-1], 400, "end too early"),
        ("gzip", gzipped(TEXT) + b"{}", 400, "got 2 bytes behind"),
        ("gzip", gzipped(TEXT) + bytes(9000), 400, "got 9000 bytes behind"),
        ("gzip", zlib.compress(b"{}"), 400, "no gzip"),
        ("deflate", gzipped(b"{}"), 400, "no deflate"),
        ("deflate", raw_deflate(b"{}"), 400, "no deflate"),
        ("gzip", gzipped(bytes((1 << 20) + 1)), 413, "above 1,048,576 bytes"),
    ],
)
def test_a_compressed_body_that_is_none(encoding, body, status, reason):
    answer = asked("POST", "/score", body, content_encoding=encoding)
    assert answer.status == status and reason in answer.reason, answer.reason
    if status == 415:
        assert answer.headers[b"accept-encoding"] == b"gzip, deflate"


def test_a_bomb_is_expanded_no_further_than_a_body_may_be():
    packed = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        answer = asked("POST", "/score", packed, content_encoding="gzip")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status == 413 and peak < 16 << 20


def test_try_again_is_said_only_where_that_can_help():
    limits = ServerLimits(body_bytes=1000, total_bytes=1500)
    assert asked("POST", "/twice", bytes(500), limits).status == 200
    answer = asked("POST", "/twice", bytes(501), limits)
    assert answer.status == 413 and "retry-after" not in answer.headers
    assert "got a request of 1,503 bytes with its answer; need at most 1,500" in answer.reason
