"""Tables split over hosts: the bits of one host, versions, hosts that go, refusals."""

import asyncio
import json
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pibroch as pb
from here_host import HereHost
from pibroch.cli.serve import _split
from pibroch.data.targets import scores_of_logits
from pibroch.errors import CheckpointError, ConfigError, WorkerLostError
from pibroch.ports import free_port
from pibroch.serve.admission import AdmissionControl
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.http import Service, build_app
from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.parts import ANSWER, MOST_IDS, REQUEST, Part, request_of
from pibroch.serve.predictor import Predictor
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.row_connection import SWITCHING, RowConnection, RowDoor, RowService
from pibroch.serve.row_hosts import ANSWER_TIMEOUT_S, row_hosts
from pibroch.serve.settings import Refusal, ServerLimits
from pibroch.serve.split_rows import RowSplit
from pibroch.serve.store import ModelStore
from pibroch.state.export_format import read_export
from served import Load, serving, until
from small_run import make_config, train_here

TOKEN = "between-hosts"


@pytest.fixture(scope="module")
def line(clicks, tmp_path_factory):
    """Exports 1 and 3, a delta 2 on 1, as ``.folders``.

    Raw ``.rows`` and the scores of them by version; ``.few`` rows.
    """
    folder = tmp_path_factory.mktemp("split")
    rows = clicks.rows[:40]
    many = SimpleNamespace(rows=rows, expected={})
    few = SimpleNamespace(rows=rows[:8], expected={})
    every = (
        "train.checkpoint_every=3",
        "train.steps=9",
        "train.keep=3",
        "train.evaluate_every=300",
    )
    run, _ = train_here(
        make_config(clicks.data, *every, "train.full_checkpoint_every=9"), folder / "run"
    )
    checkpoints = sorted((run.path / "checkpoints").glob("step-*"))
    folders = [folder / "all" / str(number) for number in (1, 2, 3)]
    export_checkpoint(checkpoints[0], folders[0], ExportOptions("int8", shard_bytes=1000))
    export_delta(checkpoints[1], folders[0], folders[1])
    export_checkpoint(checkpoints[2], folders[2], ExportOptions("int8", shard_bytes=1000))
    for path in folders:
        predictor = pb.Predictor.open(path)
        for each in (many, few):
            each.expected[predictor.version] = scores_of_logits(
                predictor.logits(predictor.encode(each.rows)).numpy(), predictor.schema
            )
    return SimpleNamespace(folders=folders, checkpoints=checkpoints, few=few, **vars(many))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_scores_have_the_bits_of_one_host(line, tmp_path, dtype, count):
    """Bags span parts and files, rows change by a delta.

    Each host and one that holds nothing score alike.
    """
    base = tmp_path / "1"
    delta = tmp_path / "2"
    export_checkpoint(line.checkpoints[0], base, ExportOptions(dtype, shard_bytes=700))
    export_delta(line.checkpoints[1], base, delta)
    hosts = tuple(HereHost(base, Part(number, count)) for number in range(1, count + 1))
    for folder in (base, delta):
        whole = pb.Predictor.open(folder)
        batch = whole.encode(line.rows)
        for part in (None, *(host.part for host in hosts)):
            split = Predictor.open_split(folder, RowSplit(part, hosts))
            split.reach_rows()
            for host in hosts:
                host.requests.clear()
            assert torch.equal(split.logits(batch), whole.logits(batch))
            assert torch.equal(split.embed(batch), whole.embed(batch))
            # one a batch
            assert all(len(host.requests) <= (0 if host.part == part else 2) for host in hosts)
            assert folder == delta or part == Part(1, 1) or any(host.requests for host in hosts)


def test_a_host_needs_the_files_of_its_part_alone(line, tmp_path):
    """Those of other parts are neither there nor looked at; its own are verified."""
    own = shutil.copytree(line.folders[0], tmp_path / "mine")
    manifest = read_export(own)
    half = sum(table.num_rows for table in manifest.tables) // 2
    for shard in manifest.shards:
        if shard.first_row >= half:
            (own / shard.file).unlink()
    rows = Predictor.open_split(own, RowSplit(Part(1, 2))).exported_rows(
        json.loads((own / "export.json").read_text())["sha256"]
    )
    assert sum(len(shard.rows) for shard in rows._shards) == half
    with pytest.raises(CheckpointError):
        Predictor.open_split(own, RowSplit(Part(2, 2)))
    with pytest.raises(CheckpointError):
        pb.Predictor.open(own)
    first = own / manifest.shards[0].file
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError):
        Predictor.open_split(own, RowSplit(Part(1, 2)))


def test_what_cannot_be_split(clicks, line, tmp_path):
    for wrong in (
        "",
        "1",
        "0/2",
        "3/2",
        "1/2/3",
        "-1/2",
        "1/9999",
        "one/two",
        "1/",
        "\u0661/\u0662",
    ):
        with pytest.raises(ConfigError, match="--part"):
            Part.parse(wrong)
    for wrong in (
        "10.0.0.2:8000",
        "ftp://a",
        "http://",
        "http://a:port",
        "http://a/path",
        "http://[::1",
        "http://a/?b",
    ):
        with pytest.raises(ConfigError, match="--rows-at"):
            row_hosts([wrong])
    with pytest.raises(ConfigError, match="another host for each part"):
        row_hosts(["http://a:1", "http://a:1"])
    with pytest.raises(ConfigError, match="all parts"):
        RowSplit(Part(1, 2), row_hosts(["http://a:1"]))
    with pytest.raises(CheckpointError, match="pibroch export"):
        Predictor.open_split(clicks.run, RowSplit(Part(1, 2)))
    with pytest.raises(ConfigError, match="--threads"):
        _split("1/2", [], None, workers=2)


def ask_app(app, path, body, method="POST"):
    """Status and body of an answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [],
        "query_string": b"",
        "raw_path": b"",
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


class Wire(asyncio.Transport):
    """What a connection writes."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data):
        self.written += data

    def close(self):
        self.is_closed = True

    abort = close

    def is_closing(self):
        return self.is_closed

    def pause_reading(self): ...

    def resume_reading(self): ...

    def get_write_buffer_size(self):
        return 0

    def take(self):
        """Status and bytes of each answer since the last time."""
        results = []
        rest = self.written
        self.written = b""
        while rest:
            status, length = ANSWER.unpack_from(rest)
            results.append((status, rest[ANSWER.size : ANSWER.size + length]))
            rest = rest[ANSWER.size + length :]
        return results


def admission_of(store, token):
    limits = ServerLimits()
    connections = OpenConnections(limits)
    app = build_app(Service(store, ServerMetrics()), connections)
    return AdmissionControl(app, limits, ServerMetrics(), token, connections)


def door_of(store, check, **limits):
    bounds = ServerLimits(**limits)
    rows = RowService(store, Part(2, 2))
    return RowDoor(rows, check, ServerMetrics(), bounds, OpenConnections(bounds))


def test_requests_for_rows_are_checked(line):
    """Whatever comes: rows of this part and of this export, within bounds, or a reason."""
    store = ModelStore(line.folders[0], split=RowSplit(Part(2, 2)))
    admission = admission_of(store, "secret")
    door = door_of(store, admission.check)
    sha256 = json.loads((line.folders[0] / "export.json").read_text())["sha256"]
    rows = store.current.exported_rows(sha256)
    held = Part(2, 2).of(rows.num_rows)
    wanted = np.array([held.start, held.stop - 1, held.start], "<i8")
    bearer = {b"authorization": b"Bearer secret"}
    door.enter("/rows/2-of-2", bearer)
    for other in ("/rows/1-of-2", "/rows/2-of-3", "/rows/", "/rows/2-of-2/"):
        with pytest.raises(Refusal, match="2-of-2, which is here") as refused:
            door.enter(other, bearer)
        assert refused.value.status == 409
    for wrong in ({}, {b"authorization": b"Bearer other"}):
        with pytest.raises(Refusal, match="token") as refused:
            door.enter("/rows/2-of-2", wrong)
        assert refused.value.status == 401

    async def ask():
        wire = Wire()
        connections = set()
        connection = RowConnection(door, connections)
        connection.connection_made(wire)
        right = request_of(sha256, wanted)
        expected = (200, rows.exported(wanted).tobytes())
        for byte in right * 2:  # however it is cut
            connection.data_received(bytes([byte]))
        assert wire.take() == [expected, expected]
        connection.data_received(right * 3)
        assert wire.take() == [expected] * 3
        connection.data_received(request_of(sha256, wanted[:0]))
        ((status, reason),) = wire.take()
        assert status == 400 and b"row ids of 8 bytes" in reason
        for outside in (held.start - 1, held.stop, -1, 1 << 62, -(1 << 63)):
            connection.data_received(request_of(sha256, np.array([held.start, outside])))
            ((status, reason),) = wire.take()
            assert status == 400 and b"which are here" in reason
        connection.data_received(request_of("0" * 64, wanted))
        ((status, reason),) = wire.take()
        assert status == 409 and store.current.version.encode() in reason
        many = np.full(MOST_IDS, held.start)
        # a thread copies them; the next one waits for it
        connection.data_received(request_of(sha256, many) + right)
        assert wire.take() == []
        while not wire.written:
            await asyncio.sleep(0.001)
        assert [(status, len(actual)) for status, actual in wire.take()] == [
            (200, MOST_IDS * rows.row_bytes),
            (200, 3 * rows.row_bytes),
        ]
        assert not wire.is_closed and connections == {connection}
        connection.data_received(request_of(sha256, np.full(MOST_IDS + 1, held.start)))
        ((status, reason),) = wire.take()
        assert status == 400 and b"row ids of 8 bytes" in reason and wire.is_closed

    asyncio.run(ask())
    app = admission_of(store, None)
    assert ask_app(app, "/rows/2-of-2", b"", "GET")[0] == 404
    status, body = ask_app(app, "/score", b"[]")
    assert (
        status == 404
        and b"--rows-at" in body
        and ask_app(app, "/v2/models/1/infer", b"{}")[0] == 404
    )


def test_a_request_for_rows_that_stops_in_the_middle_is_waited_for_so_long(line):
    store = ModelStore(line.folders[0], split=RowSplit(Part(2, 2)))
    door = door_of(store, lambda path, headers: None, body_timeout_s=0.05)

    async def ask():
        wire = Wire()
        connection = RowConnection(door, set())
        connection.connection_made(wire)
        await asyncio.sleep(0.1)
        assert not wire.is_closed, "nothing is asked: that may take as long as it likes"
        connection.data_received(request_of("0" * 64, np.arange(3))[:-1])
        async with asyncio.timeout(5):
            while not wire.is_closed:
                await asyncio.sleep(0.001)

    asyncio.run(ask())


def test_a_host_that_says_nothing_is_waited_for_once(line):
    """It takes connections and never answers.

    An error with its name in time, and then at once for a moment.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hosts = row_hosts([url, "http://127.0.0.1:9"])
        predictor = Predictor.open_split(line.folders[0], RowSplit(Part(2, 2), hosts))
        times = []
        for _ in range(2):
            begun = time.monotonic()
            with pytest.raises(WorkerLostError, match=re.escape(url)):
                predictor.score_raw(line.rows)
            times.append(time.monotonic() - begun)
        assert (
            ANSWER_TIMEOUT_S <= times[0] < ANSWER_TIMEOUT_S + 2 and times[1] < ANSWER_TIMEOUT_S / 2
        )


@pytest.mark.parametrize(
    "words",
    [
        [b"\x00\x01\x02 no HTTP\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"],
        [b""],
        [b"HTTP/1.1 " * 9000],
        [b"HTTP/1.1 404 Not Found\r\ncontent-length: 999999999\r\n\r\n" + bytes(70_000)],
        [SWITCHING + b"more"],
        [SWITCHING, ANSWER.pack(200, 3) + b"abc"],
        [SWITCHING, ANSWER.pack(200, 300_000) + bytes(300_000)],
        [SWITCHING, ANSWER.pack(409, 3) + b"abc"],
        [SWITCHING, ANSWER.pack(200, 300)[:-1]],
        [SWITCHING, b""],
    ],
)
def test_what_is_no_answer(line, words):
    with socket.create_server(("127.0.0.1", 0)) as odd:
        url = f"http://127.0.0.1:{odd.getsockname()[1]}"
        predictor = Predictor.open_split(
            line.folders[0], RowSplit(Part(2, 2), row_hosts([url, "http://127.0.0.1:9"]))
        )

        def answer():
            connection, _ = odd.accept()
            with connection:
                for part in words:
                    connection.recv(1 << 16)
                    connection.sendall(part)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkerLostError, match=re.escape(url)):
            predictor.score_raw(line.rows)
        thread.join(10)


def test_a_connection_that_was_closed_meanwhile_is_made_anew(line):
    """A host ends what is idle, or was started again: nobody notices."""
    here = HereHost(line.folders[0], Part(1, 2))
    with socket.create_server(("127.0.0.1", 0)) as host:
        hosts = row_hosts([f"http://127.0.0.1:{host.getsockname()[1]}", "http://127.0.0.1:9"])
        predictor = Predictor.open_split(line.folders[0], RowSplit(Part(2, 2), hosts))

        def answer_once_a_connection():
            for _ in range(3):
                connection, _ = host.accept()
                with connection, connection.makefile("rb") as requested:
                    path = requested.readline().split()[1].decode()
                    while requested.readline().strip():
                        pass
                    connection.sendall(SWITCHING)
                    head = requested.read(REQUEST.size)
                    request = head + requested.read(8 * REQUEST.unpack(head)[1])
                    body = here.ask(path, request, 1 << 20, 0).answer()
                    connection.sendall(ANSWER.pack(200, len(body)) + body)

        thread = threading.Thread(target=answer_once_a_connection)
        thread.start()
        expected = pb.Predictor.open(line.folders[0]).score_raw(line.rows)
        for _ in range(3):
            assert torch.equal(predictor.score_raw(line.rows), expected)
        thread.join(10)


class TwoHosts:
    """Both halves of a folder of models, each on a host of its own, with a copy of the models."""

    def __init__(self, folder, first, stack):
        self.ports = free_port(), free_port()
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.models = [folder / f"host{number}" / "ctr" for number in (1, 2)]
        for models in self.models:
            shutil.copytree(first, models / "1")
        self._stack = stack
        self.servers = [self.start(number) for number in (0, 1)]

    def start(self, number):
        options = [
            "--port",
            self.ports[number],
            "--part",
            f"{number + 1}/2",
            "--reload-every",
            0.05,
        ]
        options += [option for url in self.urls for option in ("--rows-at", url)]
        return self._stack.enter_context(
            serving(self.models[number], *options, env={"PIBROCH_SERVE_TOKEN": TOKEN})
        )

    def ask(self, number, rows):
        return self.servers[number].ask(
            "POST", "/score", {"rows": rows}, {"authorization": f"Bearer {TOKEN}"}
        )

    def add(self, number, folder):
        coming = shutil.copytree(folder, self.models[number].parent / "coming")
        coming.rename(self.models[number] / folder.name)

    def until_ready(self):
        for server in self.servers:
            until(lambda server=server: server.ask("GET", "/v2/health/ready").status == 200)


class AuthorisedLoad(Load):
    """Load on one of the hosts, with the token."""

    def _ask(self):
        while not self._stop.is_set():
            answer = self.server.ask(
                "POST", "/score", {"rows": self.versions.rows}, {"authorization": f"Bearer {TOKEN}"}
            )
            if answer.status != 200:
                self.failures.append(answer)
                return
            version = answer.json["model_version"]
            if not np.array_equal(
                np.float32(answer.json["scores"]), self.versions.expected[version]
            ):
                self.failures.append((answer, version))
            self.seen.append(version)


def test_two_hosts_score_as_one_and_survive_each_other(line, tmp_path):
    """The same bits from both, also of few rows, which the event loop asks for.

    A new version serves only where both have it; a host that is killed is named, and comes back.
    """
    with ExitStack() as stack:
        hosts = TwoHosts(tmp_path, line.folders[0], stack)
        hosts.until_ready()
        first, second, third = line.expected
        for number in (0, 1):
            answer = hosts.ask(number, line.rows)
            assert np.array_equal(np.float32(answer.json["scores"]), line.expected[first])
        assert hosts.servers[0].ask("POST", "/rows/0/1-of-2", b"").status == 401
        with (
            AuthorisedLoad(hosts.servers[0], line, 1) as load,
            AuthorisedLoad(hosts.servers[1], line.few, 1) as other,
        ):
            hosts.add(0, line.folders[1])  # a delta stands on what both have
            load.until_seen(second)
            hosts.add(0, line.folders[2])
            until(lambda: "until all hosts have the next" in hosts.servers[0].complaints())
            assert third not in load.seen
            hosts.add(1, line.folders[2])
            load.until_seen(third)
            other.until_seen(third)
        assert not load.failures and not other.failures
        hosts.servers[1].program.send_signal(signal.SIGKILL)
        until(lambda: hosts.servers[1].program.poll() is not None)
        for rows in (line.few.rows, line.rows):
            begun = time.monotonic()
            answer = hosts.ask(0, rows)
            assert (
                answer.status == 503
                and hosts.urls[1] in answer.reason
                and answer.headers["retry-after"] == "1"
            )
            assert time.monotonic() - begun < 5
        hosts.servers[1] = hosts.start(1)
        until(lambda: hosts.ask(0, line.rows).status == 200)
        for number in (0, 1):
            until(lambda number=number: hosts.ask(number, line.rows).status == 200)
            for export in (line, line.few):
                response = hosts.ask(number, export.rows).json["scores"]
                assert np.array_equal(np.float32(response), export.expected[third])
