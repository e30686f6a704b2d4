"""What a server does with requests that are wrong, too large, too slow, too many or not allowed."""

import gzip
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from certificates import authority, signed
from pibroch.serve.export import export_checkpoint
from raw_clicks import COLUMNS
from served import ask, serving, until
from small_run import run_command

CSV = {"content-type": "text/csv"}
SOAK = int(os.environ.get("PIBROCH_SOAK_REQUESTS", "0"))
"""Mutated requests; 100000 is the whole measurement."""


@pytest.fixture(scope="module")
def small(clicks, tmp_path_factory):
    """A server with narrow limits: ``.server``, ``.row``."""
    folder = tmp_path_factory.mktemp("served")
    export_checkpoint(clicks.run, folder / "ctr")
    limits = ("--max-rows", 8, "--max-body-mb", 0.05, "--body-timeout", 0.5)
    with serving(folder / "ctr", *limits) as server:
        yield SimpleNamespace(server=server, row=clicks.rows[0], export=folder / "ctr")


def tensor(**changes):
    return {"name": "age", "shape": [1], "datatype": "BYTES", "data": ["20"], **changes}


def raw_tensors(**of_age):
    others = [tensor(name=name, data=["1"]) for name in COLUMNS[1:] if name != "age"]
    return {"inputs": [*others, tensor(**of_age)]}


ENCODED = {
    "dense": {"datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]},
    "ids": {"datatype": "INT64", "shape": [1, 4], "data": [1, 1, 1, 1]},
    "tags.values": {"datatype": "INT64", "shape": [2], "data": [1, 2]},
    "tags.lengths": {"datatype": "INT64", "shape": [1], "data": [2]},
}


def encoded(name, **changes):
    return {
        "inputs": [
            {"name": each, **ENCODED[each], **(changes if each == name else {})} for each in ENCODED
        ]
    }


INFER = "/v2/models/ctr/infer"
SCORE = "/score"
WRONG = {
    "no JSON": (SCORE, b"{", 400, "no JSON"),
    "other JSON": (SCORE, {"row": []}, 400, "another form"),
    "a number": (SCORE, b"7", 400, "another form"),
    "deep": (SCORE, b"[" * 10_000, 400, "no JSON"),
    "no rows": (SCORE, {"rows": []}, 400, "1 to 8"),
    "too many rows": (SCORE, {"rows": [dict.fromkeys(COLUMNS)] * 9}, 400, "1 to 8"),
    "no object": (SCORE, {"rows": ["a"]}, 400, "str as row 0"),
    "no column": (SCORE, {"rows": [{"age": 1}]}, 400, "without `price`"),
    "nested": (
        SCORE,
        {"rows": [{**dict.fromkeys(COLUMNS), "tags": [[1]]}]},
        400,
        "nested list as `tags` of row 0",
    ),
    "no number": (SCORE, {"rows": [{**dict.fromkeys(COLUMNS), "age": "old"}]}, 400, "`old` as age"),
    "a list of one": (
        SCORE,
        {"rows": [{**dict.fromkeys(COLUMNS), "user": ["a"]}]},
        400,
        "a list as user",
    ),
    "other lengths": (
        SCORE,
        {"columns": {name: [1] * (1 + (name == "age")) for name in COLUMNS}},
        400,
        "lengths",
    ),
    "no list": (SCORE, {"columns": dict.fromkeys(COLUMNS, 1)}, 400, "no list of values"),
    "half a character": (
        SCORE,
        b'{"rows": [' + json.dumps(dict.fromkeys(COLUMNS, "\ud800")).encode() + b"]}",
        400,
        "",
    ),
    "no request": (INFER, {"input": []}, 400, "inputs"),
    "no inputs": (INFER, {"inputs": []}, 400, "need encoded"),
    "unknown input": (INFER, {"inputs": [tensor(name="colour")]}, 400, "unknown input `colour`"),
    "twice": (INFER, {"inputs": [tensor(), tensor()]}, 400, "`age` twice"),
    "no data": (INFER, raw_tensors(data=None), 400, "without data"),
    "another shape": (INFER, raw_tensors(shape=[3]), 400, "1 items"),
    "negative shape": (INFER, raw_tensors(shape=[-1]), 400, "shape"),
    "huge shape": (INFER, raw_tensors(shape=[1 << 30, 1 << 30]), 400, "1 items"),
    "huge and empty": (
        INFER,
        raw_tensors(shape=[0, *[(1 << 31) - 1] * 3], data=[]),
        400,
        "besides a 0",
    ),
    "long and empty": (
        INFER,
        encoded("ids", shape=[(1 << 31) - 1, 0], data=[]),
        400,
        "besides a 0",
    ),
    "less long and empty": (INFER, encoded("ids", shape=[1 << 20, 0], data=[]), 400, "samples"),
    "huge number": (INFER, raw_tensors(datatype="FP32", data=[1e300]), 400, "no FP32"),
    "two columns": (INFER, raw_tensors(shape=[1, 2], data=["1", "2"]), 400, "[B] or [B, 1]"),
    "unknown type": (INFER, raw_tensors(datatype="TEXT"), 400, "datatype TEXT"),
    "wrong type": (INFER, raw_tensors(data=[1]), 400, "no text"),
    "too large": (INFER, raw_tensors(datatype="INT8", data=[300]), 400, "INT8"),
    "unequal": (INFER, raw_tensors(shape=[2], data=["1", "2"]), 400, "values"),
    "unknown output": (INFER, {**raw_tensors(), "outputs": [{"name": "loss"}]}, 400, "`loss`"),
    "binary size": (
        INFER,
        raw_tensors(data=None, parameters={"binary_data_size": 4}),
        400,
        "0 bytes left",
    ),
    "ids outside": (INFER, encoded("ids", data=[1, 1, 1000, 1]), 400, "id 1000 for feature 'slot'"),
    "negative ids": (INFER, encoded("ids", data=[-1, 1, 1, 1]), 400, "id -1"),
    "floats as ids": (INFER, encoded("ids", datatype="FP32"), 400, "float32"),
    "lengths": (INFER, encoded("tags.lengths", data=[3]), 400, "do not sum"),
    "negative lengths": (INFER, encoded("tags.lengths", shape=[1], data=[-2]), 400, "do not sum"),
    "other samples": (INFER, encoded("dense", shape=[2, 2], data=[1, 2, 3, 4]), 400, "samples"),
    "a scalar": (INFER, encoded("dense", shape=[], data=[1]), 400, "shape"),
    "unknown model": ("/v2/models/other/infer", {}, 404, "need `ctr`"),
    "unknown version": ("/v2/models/ctr/versions/1/infer", raw_tensors(), 404, "version `1`"),
    "unknown path": ("/v3", {}, 404, "endpoints"),
    "large": (SCORE, b" " * 60_000, 413, "52,428 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_reason_for_what_is_wrong(small, case):
    path, body, status, reason = WRONG[case]
    answer = small.server.ask("POST", path, body)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert reason in answer.reason, answer.reason


def test_the_right_ones_are_right(small):
    assert small.server.ask("POST", INFER, encoded("")).status == 200
    assert small.server.ask("POST", INFER, raw_tensors()).status == 200
    assert (
        small.server.ask(
            "POST", INFER, raw_tensors(datatype="FP64", data=[20.0], shape=[1, 1])
        ).status
        == 200
    )
    assert small.server.ask("POST", INFER, raw_tensors(data=[["20"]], shape=[1, 1])).status == 200


def test_lines(small):
    header = ",".join(COLUMNS).encode()
    for body, reason in (
        (b"a,b\n1,2", "0 columns `price`"),
        (header + b"\n1,2,3", "3 fields in row 0"),
        (header + b'\n1,2,3,"4', "cannot be read"),
        (b"", "columns `price`"),
        (header, "1 to 8"),
        (header + b"\n1,2,3,\xff\xfe,5,1,\xff|a", None),
    ):
        answer = small.server.ask("POST", SCORE, body, CSV)
        assert answer.status == (200 if reason is None else 400) and (
            reason is None or reason in answer.reason
        )
    assert small.server.ask("POST", SCORE, b"x", {"content-type": "image/png"}).status == 415
    assert small.server.ask("POST", SCORE, b"x", {"content-encoding": "br"}).status == 415
    assert small.server.ask("GET", SCORE).status == 405


FLOODS = {
    "blank lines": (",".join(COLUMNS).encode() + b"\n" * (15 << 20), CSV, "got 0 rows"),
    "lines": (
        b"\n".join([",".join(COLUMNS).encode(), *[b",,,,,,"] * (2 << 20)]),
        CSV,
        "more than 8192 rows",
    ),
    "rows": (b'{"rows": [{}' + b",{}" * (5 << 20) + b"]}", None, "got 5242881 rows"),
    "columns": (b'{"columns": {"age": [1' + b",1" * (7 << 20) + b"]}}", None, "got 7340033 rows"),
    "a row of lists": (b'[{"tags": [[]' + b",[]" * (5 << 20) + b"]}]", None, "lists and objects"),
    "a tensor": (
        b'{"inputs": [{"name": "age", "shape": [1], "datatype": "FP64", "data": [1'
        + b",1" * (7 << 20)
        + b"]}]}",
        None,
        "7340033 items",
    ),
}


def peak_bytes(server):
    status = Path(f"/proc/{server.program.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_flood_is_counted_before_it_is_read_and_stops_nobody(small):
    """Bodies as large as they may be, with as many rows as fit into them.

    Others are answered meanwhile.
    """
    with serving(small.export) as server:
        before = peak_bytes(server)
        slowest = 0.0
        for name, (body, headers, reason) in FLOODS.items():
            path = INFER if name == "a tensor" else SCORE
            answers = []
            flood = threading.Thread(
                target=lambda: answers.append(server.ask("POST", path, body, headers))  # noqa: B023
            )
            flood.start()
            while flood.is_alive():
                started = time.monotonic()
                assert server.ask("GET", "/v2/health/ready").status == 200
                slowest = max(slowest, time.monotonic() - started)
            flood.join(60)
            assert answers[0].status == 400 and reason in answers[0].reason, answers[0].reason
        assert slowest < 2
        assert peak_bytes(server) - before < 600 << 20


def test_a_body_without_a_length_is_bounded_too(small):
    def pieces():
        for _ in range(100):
            yield b" " * 1000

    connection = small.server.connect()
    try:
        connection.request(
            "POST", SCORE, pieces(), {"content-type": "application/json"}, encode_chunked=True
        )
        answer = connection.getresponse()
        assert answer.status == 413 and b"52,428" in answer.read()
    finally:
        connection.close()


HEAD = b"POST /score HTTP/1.1\r\nhost: a\r\n"
SLOW = {
    "body": (HEAD + b"content-length: 100\r\n\r\n{", b"HTTP/1.1 408", b"in 0.5 s"),
    "nothing": (b"", b"HTTP/1.1 408", b"in 0.5 s"),
    "half a head": (HEAD, b"HTTP/1.1 408", b"in 0.5 s"),
    "half a second head": (
        b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n" + HEAD,
        b"HTTP/1.1 200",
        b"HTTP/1.1 408",
    ),
    "endless head": (HEAD + b"x-y: z\r\n" * 8200, b"HTTP/1.1 431", b"65,536 bytes"),
    "no HTTP": (b"\x16\x03\x01\x02\x00", b"HTTP/1.1 400", b"invalid HTTP"),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_client_that_does_not_come_to_its_end_is_told(small, case):
    sent, begins, has = SLOW[case]
    with socket.create_connection(small.server.address, timeout=30) as slow:
        slow.sendall(sent)
        received = b""
        while chunk := slow.recv(4096):  # until the server closes
            received += chunk
    assert received.startswith(begins) and has in received, received
    assert small.server.ask("POST", SCORE, {"rows": [small.row]}).status == 200


def test_clients_that_leave_do_no_harm(small):
    for part in (
        b"POST /score HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{",
        b"POST /sc",
        b"\x16\x03\x01\x02\x00",
    ):
        with socket.create_connection(small.server.address, timeout=30) as client:
            client.sendall(part)
    until(lambda: small.server.metric("pibroch_requests_open") == 1)
    assert small.server.ask("POST", SCORE, {"rows": [small.row]}).status == 200


def test_a_full_queue(small):
    """The first request waits for others.

    While it does, there is no room for a second that is too large.
    """
    with serving(small.export, "--batch-delay-ms", 1000, "--max-queue-rows", 4) as server:
        results = []
        first = threading.Thread(
            target=lambda: results.append(server.ask("POST", SCORE, {"rows": [small.row] * 4}))
        )
        first.start()
        until(lambda: server.metric("pibroch_rows_waiting") == 4)
        refused = server.ask("POST", SCORE, {"rows": [small.row]})
        first.join(60)
        assert (
            refused.status == 429
            and "4 waiting" in refused.reason
            and refused.headers["retry-after"] == "1"
        )
        assert results[0].status == 200


def test_requests_are_computed_together(small):
    with serving(small.export, "--batch-delay-ms", 1000) as server:
        threads = [
            threading.Thread(target=server.ask, args=("POST", SCORE, {"rows": [small.row] * count}))
            for count in (1, 2, 3)
        ]
        bad = threading.Thread(
            target=server.ask, args=("POST", SCORE, {"rows": [{**small.row, "age": "x"}]})
        )
        for thread in (*threads, bad):
            thread.start()
        for thread in (*threads, bad):
            thread.join(60)
        assert server.metric('pibroch_requests_total{endpoint="score",status="200"}') == 3
        assert server.metric('pibroch_requests_total{endpoint="score",status="400"}') == 1
        assert server.metric("pibroch_batch_rows_count") < 4


def test_a_token(small, tmp_path):
    (tmp_path / "token").write_text("secret-7\n")
    (tmp_path / "token").chmod(0o440)
    with serving(small.export, "--token-file", tmp_path / "token") as server:
        body = {"rows": [small.row]}
        assert server.ask("POST", SCORE, body).status == 401
        for wrong in ("secret-7", "Bearer secret", "Bearer secret-77", "Basic secret-7", ""):
            answer = server.ask("POST", SCORE, body, {"authorization": wrong})
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert server.ask("POST", SCORE, body, {"authorization": "bearer secret-7"}).status == 200
        assert server.ask("GET", "/v2/health/ready").status == 200
        for path in ("/metrics", "/docs", "/openapi.json", "/v2/models/ctr", "/nothing"):
            assert server.ask("GET", path).status == 401


def test_a_token_that_is_none_or_not_secret(small, tmp_path):
    """A server that was to ask for a token never starts without one.

    Nor with one that everybody has.
    """
    file = tmp_path / "token"
    for content, mode in ((b"secret-7", 0o644), (b"two words", 0o600)):
        file.write_bytes(content)
        file.chmod(mode)
        ran = run_command("serve", small.export, "--port", 0, "--token-file", file)
        assert ran.returncode == 2 and "--token-file" in ran.stderr, (content, ran.stderr)
        assert mode == 0o600 or "mode" in ran.stderr
        file.unlink()
    os.mkfifo(file, 0o600)
    ran = run_command("serve", small.export, "--port", 0, "--token-file", file)
    assert ran.returncode == 2 and "no regular file" in ran.stderr
    ran = run_command("serve", small.export, "--port", 0, env={"PIBROCH_SERVE_TOKEN": ""})
    assert ran.returncode == 2 and "PIBROCH_SERVE_TOKEN" in ran.stderr, ran.stderr


def test_tls(small, tmp_path):
    by = authority(tmp_path, "authority")
    certificate, key, _ = signed(tmp_path, "server", by)
    context = ssl.create_default_context(cafile=by[1])
    context.check_hostname = False
    env = {"PIBROCH_SERVE_TOKEN": "t"}
    with serving(
        small.export, "--tls-cert", certificate, "--tls-key", key, env=env, tls=context
    ) as server:
        assert (
            server.ask("POST", SCORE, {"rows": [small.row]}, {"authorization": "Bearer t"}).status
            == 200
        )
        plain = http.client.HTTPConnection(*server.address, timeout=30)
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(plain, "GET", "/v2/health/live")
        plain.close()


def resident_bytes(pid):
    """Of a process; nothing where the system does not say."""
    status = Path(f"/proc/{pid}/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def mutated(body, headers, rng):
    """A request with a few bytes changed, removed or added, and perhaps a header.

    A compressed one as it travels, or what is compressed.
    """
    is_late = rng.random() < 0.5
    body = bytearray(packed(body, headers) if is_late else body)
    original = headers
    headers = dict(headers)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            body[at : at + rng.randint(1, 30)] = b""
        elif kind == 1:
            body[at:at] = rng.randbytes(rng.randint(1, 4))
        elif kind == 2:
            body[at:at] = rng.choice(
                [
                    b"null",
                    b"[",
                    b"{",
                    b"-1",
                    b"1e999",
                    b'"',
                    b"\\ud800",
                    b"9" * 400,
                    b",",
                    b"true",
                    b"[[]]",
                    b"0,2147483647,2147483647,2147483647",
                    b"9" * 5000,
                    b"1e39",
                ]
            )
        elif kind == 3 and body:
            body[at % len(body)] ^= 1 << rng.randrange(8)
        else:
            start = rng.randrange(len(body) + 1)
            body[at:at] = body[start : start + 40]
    if rng.random() < 0.2:
        name = rng.choice(
            ["content-type", "inference-header-content-length", "content-encoding", "accept"]
        )
        headers[name] = rng.choice(
            ["", "0", "99999999", "-1", "text/csv", "application/json", "gzip", "x" * 100, "é"]
        )
    return bytes(body) if is_late else packed(bytes(body), original), headers


def packed(body, headers):
    """A body as it travels."""
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}.get(headers.get("content-encoding"))
    return body if pack is None else pack(body)


def originals(row):
    text = json.dumps(encoded("")).encode()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "dense",
                    "datatype": "FP32",
                    "shape": [1, 2],
                    "parameters": {"binary_data_size": 8},
                },
                {
                    "name": "ids",
                    "datatype": "INT64",
                    "shape": [1, 4],
                    "parameters": {"binary_data_size": 32},
                },
                {
                    "name": "tags.values",
                    "datatype": "INT64",
                    "shape": [1],
                    "parameters": {"binary_data_size": 8},
                },
                {
                    "name": "tags.lengths",
                    "datatype": "INT64",
                    "shape": [1],
                    "parameters": {"binary_data_size": 8},
                },
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    binary = (
        head + np.array([1, 2], "<f4").tobytes() + np.array([1, 1, 1, 1, 3, 1], "<i8").tobytes()
    )
    lines = "\n".join([",".join(COLUMNS), *[",".join(row[name] for name in COLUMNS)] * 3]).encode()
    of_binary = {"inference-header-content-length": str(len(head))}
    return [
        (INFER, text, {"content-type": "application/json"}),
        (INFER, json.dumps({**raw_tensors(), "id": "a"}).encode(), {}),
        (INFER, binary, of_binary),
        (SCORE, json.dumps({"rows": [row, row]}).encode(), {"content-type": "application/json"}),
        (SCORE, lines, CSV),
        (INFER, binary, {**of_binary, "content-encoding": "gzip"}),
        (SCORE, lines, {**CSV, "content-encoding": "deflate"}),
    ]


@pytest.mark.timeout(0 if SOAK else 280)
def test_thousands_of_mutated_requests(small):
    rng = random.Random(11)
    valid = originals(small.row)
    statuses = {}
    connection = small.server.connect()
    for path, body, headers in valid:
        assert ask(connection, "POST", path, packed(body, headers), headers).status == 200
    resident = []
    for number in range(SOAK or 4000):
        if number % 1000 == 0:
            resident.append(resident_bytes(small.server.program.pid))
        path, *original = rng.choice(valid)
        body, headers = mutated(*original, rng)
        headers = {name: value.encode("latin-1") for name, value in headers.items()}
        try:
            answer = ask(connection, "POST", path, body, headers)
        except (
            http.client.HTTPException,
            OSError,
        ):
            # it closed the connection after its last answer
            connection.close()
            answer = ask(connection, "POST", path, body, headers)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status == 200 or (400 <= answer.status < 500 and answer.reason), (
            answer.body,
            path,
            body,
            headers,
        )
    connection.close()
    assert statuses[200] > 100 and statuses[400] > 1000
    after_start = resident[len(resident) // 4 :]
    assert max(after_start) - after_start[0] < 24 << 20, resident
    assert small.server.metric("pibroch_requests_open") == 1
