"""Tables split over hosts: the bits of one host, versions, hosts that go, refusals."""

import asyncio
import json
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
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
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.rows import RowWorker
from pibroch.rpc.transport import stream
from pibroch.rpc.transport.frames import Kind, header
from pibroch.serve.admission import AdmissionControl
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.http import Service, build_endpoints
from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.parts import ANSWER_TIMEOUT_S, MOST_IDS, Part, by_ids
from pibroch.serve.predictor import Predictor
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.row_hosts import RowAccess, row_hosts, when_read
from pibroch.serve.row_service import rows_of
from pibroch.serve.settings import ServerLimits
from pibroch.serve.split_rows import RowSplit
from pibroch.serve.store import ModelStore
from pibroch.state.export_format import read_export
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import Identity, Purpose
from served import Load, serving, until
from small_run import make_config, train_here

TOKEN = "between-hosts"
ACCESS = RowAccess(b"the secret of these hosts alone!")
TIMEOUT_S = 60.0


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
            split = Predictor.open(folder, split=RowSplit(part, hosts))
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
    rows = Predictor.open(own, split=RowSplit(Part(1, 2))).exported_rows(
        json.loads((own / "export.json").read_text())["sha256"]
    )
    assert sum(len(shard.rows) for shard in rows._shards) == half
    with pytest.raises(CheckpointError):
        Predictor.open(own, split=RowSplit(Part(2, 2)))
    with pytest.raises(CheckpointError):
        pb.Predictor.open(own)
    first = own / manifest.shards[0].file
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError):
        Predictor.open(own, split=RowSplit(Part(1, 2)))


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
    for wrong in ("10.0.0.2", "http://a:1", "", ":1", "a:port", "a:1/path", "[::1", "b@a:1"):
        with pytest.raises(ConfigError, match="--rows-at"):
            row_hosts([wrong], ACCESS)
    with pytest.raises(ConfigError, match="another host for each part"):
        row_hosts(["a:1", "a:1"], ACCESS)
    with pytest.raises(ConfigError, match="all parts"):
        RowSplit(Part(1, 2), row_hosts(["a:1"], ACCESS))
    with pytest.raises(CheckpointError, match="pibroch export"):
        Predictor.open(clicks.run, split=RowSplit(Part(1, 2)))
    with pytest.raises(ConfigError, match="--threads"):
        _split("1/2", [], ACCESS, workers=2)


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


def admission_of(store, token):
    connections = OpenConnections(ServerLimits())
    endpoints = build_endpoints(Service(store, ServerMetrics()))
    return AdmissionControl(endpoints, ServerMetrics(), token, connections)


@contextmanager
def giving(give, part, port=0, access=ACCESS):
    """A host that gives rows: its port."""
    me = WorkerInfo(part.worker, part.number)
    worker = RowWorker(me, access.secret, {}, by_ids(give), ("127.0.0.1", port), access.tls)
    worker.start()
    try:
        yield worker.port
    finally:
        worker.close()


@contextmanager
def asking(*addresses, access=ACCESS):
    """Hosts as another one knows them."""
    hosts = row_hosts(addresses, access)
    try:
        yield hosts
    finally:
        hosts[0].worker.close()


def test_requests_for_rows_are_checked(line):
    """Whatever comes: rows of this part and of this export, within bounds, or a reason."""
    store = ModelStore(line.folders[0], split=RowSplit(Part(2, 2)))
    sha256 = json.loads((line.folders[0] / "export.json").read_text())["sha256"]
    rows = store.current.exported_rows(sha256)
    held = Part(2, 2).of(rows.num_rows)
    wanted = np.array([held.start, held.stop - 1, held.start])
    metrics = ServerMetrics()
    with giving(partial(rows_of, store, Part(2, 2), metrics), Part(2, 2)) as port:
        with asking("127.0.0.1:9", f"127.0.0.1:{port}") as (_, host):
            right = rows.exported(wanted).tobytes()
            for answer in [host.read(sha256, wanted) for _ in range(5)]:
                assert answer.result(TIMEOUT_S).tobytes() == right

            def refused(sha256, ids):
                with pytest.raises(WorkerLostError, match=str(port)) as error:
                    host.read(sha256, ids).result(TIMEOUT_S)
                return str(error.value)

            assert "without numbers" in refused(sha256, wanted[:0])
            for outside in (held.start - 1, held.stop, -1, 1 << 62, -(1 << 63)):
                ids = np.array([held.start, outside])
                assert "which are here" in refused(sha256, ids)
            assert store.current.version in refused("0" * 64, wanted)
            assert "row ids" in refused(sha256, np.full(MOST_IDS + 1, held.start))
            assert "without numbers" in refused(sha256, wanted.astype(np.float32))
            many = host.read(sha256, np.full(MOST_IDS, held.start))  # a thread copies them
            few = host.read(sha256, wanted)
            assert few.result(TIMEOUT_S).tobytes() == right
            assert many.result(TIMEOUT_S).nbytes == MOST_IDS * rows.row_bytes
        for count, access, reason in (
            (3, ACCESS, "2-of-2"),
            (2, RowAccess(b"another secret than that of it!!"), "secret"),
        ):
            addresses = [
                f"127.0.0.1:{port if number == 1 else number + 9}" for number in range(count)
            ]
            with (
                asking(*addresses, access=access) as hosts,
                pytest.raises(WorkerLostError, match=reason),
            ):
                hosts[1].read(sha256, wanted).result(TIMEOUT_S)
    assert 'pibroch_requests_total{endpoint="rows",status="409"} 1' in metrics.text({}).decode()
    app = admission_of(store, None)
    status, body = ask_app(app, "/score", b"[]")
    assert (
        status == 404
        and b"--rows-at" in body
        and ask_app(app, "/v2/models/1/infer", b"{}")[0] == 404
    )


def test_a_request_for_rows_that_stops_in_the_middle_is_waited_for_so_long(monkeypatch):
    """Who has proved itself may say nothing for as long as it likes, but not begin and stop."""
    monkeypatch.setattr(stream, "STALL_S", 0.2)
    part = Part(1, 1)
    with giving(lambda of, ids: ids, part) as port, admitted_at(port, part.worker) as link:
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):
            link.recv(1)
        link.settimeout(TIMEOUT_S)
        link.sendall(header(Kind.REQUEST, 1, 100, 0)[:-1])
        assert link.recv(1) == b""


@contextmanager
def admitted_at(port, name):
    """A connection to a worker of this name that has proved that it knows the secret."""
    side = Client(ACCESS.secret, Identity("rows:test", 99, 1), name, Purpose(1))
    with socket.create_connection(("127.0.0.1", port)) as link:
        while not side.done:
            link.sendall(side.receive(link.recv(1 << 12)))
        yield link


def test_a_host_that_says_nothing_is_waited_for_once(line):
    """It takes connections and never answers.

    An error with its name in time, and then at once for a moment.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with asking(address, "127.0.0.1:9") as hosts:
            predictor = Predictor.open(line.folders[0], split=RowSplit(Part(2, 2), hosts))
            times = []
            for _ in range(2):
                begun = time.monotonic()
                with pytest.raises(WorkerLostError, match=re.escape(address)):
                    predictor.score_raw(line.rows)
                times.append(time.monotonic() - begun)
        assert (
            ANSWER_TIMEOUT_S <= times[0] < ANSWER_TIMEOUT_S + 2 and times[1] < ANSWER_TIMEOUT_S / 2
        )


class Imposter:
    """Whoever listens in the place of a host: it may know the secret, or not.

    Args:
        words: what it says on each connection, after the handshake where it can.
        knows: whether it has the secret.
    """

    def __init__(self, words, knows=True):
        self._words = words
        self._knows = knows
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self):
        self._listener.close()

    def _answer(self):
        with suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                with link, suppress(OSError):
                    if self._knows:
                        side = Server(ACCESS.secret, Identity(Part(1, 2).worker, 1, 7))
                        link.sendall(side.start())
                        while not side.done:
                            link.sendall(side.receive(link.recv(1 << 12)))
                        link.recv(1 << 16)
                    link.sendall(self._words)


def framed(metadata, payload=b"", kind=Kind.ANSWER):
    return header(kind, 1, len(metadata), len(payload)) + metadata + payload


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        bytes(70_000),
        framed(b""),
        framed(b"\xff" * 9),
        framed(b"\xff" * 9, kind=Kind.FAILURE),
        framed(b"", bytes(299)),
        framed(b"", bytes(300_000)),
        framed(b"", bytes(9), Kind.BULK),
        framed(b"", bytes(300))[:-1],
        header(Kind.ANSWER, 1, 1 << 31, 0),
        header(Kind.ANSWER, 1, 9, 1 << 60),
        framed(b"", kind=Kind.GOODBYE),
    ],
)
@pytest.mark.parametrize("knows", [True, False])
def test_what_is_no_answer(line, words, knows):
    with closing(Imposter(words, knows)) as odd, asking(odd.address, "127.0.0.1:9") as hosts:
        predictor = Predictor.open(line.folders[0], split=RowSplit(Part(2, 2), hosts))
        with pytest.raises(WorkerLostError, match=re.escape(odd.address)):
            predictor.score_raw(line.rows)


def test_a_connection_that_was_closed_meanwhile_is_made_anew(line):
    """A host was started again: nobody notices."""
    here = HereHost(line.folders[0], Part(1, 2))
    port = free_port()
    expected = pb.Predictor.open(line.folders[0]).score_raw(line.rows)
    with asking(f"127.0.0.1:{port}", "127.0.0.1:9") as hosts:
        predictor = Predictor.open(line.folders[0], split=RowSplit(Part(2, 2), hosts))
        for _ in range(3):
            with giving(here.give, here.part, port):
                assert torch.equal(predictor.score_raw(line.rows), expected)
                assert torch.equal(predictor.score_raw(line.rows), expected)


async def come(reading):
    """The rows of a reading, in whose loop this runs."""
    loop = asyncio.get_running_loop()
    is_there = loop.create_future()
    when_read(loop, [reading], lambda: is_there.set_result(None))
    await asyncio.wait_for(is_there, TIMEOUT_S)
    return reading.result(0)


def test_a_request_goes_on_in_asyncio_and_behind_it(line):
    """The loop that turns it may end, and another begin."""
    here = HereHost(line.folders[0], Part(1, 2))
    sha256 = json.loads((line.folders[0] / "export.json").read_text())["sha256"]
    ids = np.arange(5)
    right = here.give(sha256, ids).tobytes()
    with (
        giving(here.give, here.part) as port,
        asking(f"127.0.0.1:{port}", "127.0.0.1:9") as (host, _),
    ):

        async def ask():
            host.worker.attach(asyncio.get_running_loop())
            try:
                answer = host.read(sha256, ids)
                assert (await come(answer)).tobytes() == right
                turning = [each.name for each in threading.enumerate()].count("rows")
                assert turning == 1, "that of the host that gives"
                silent = row_hosts(["127.0.0.1:9"], ACCESS)[0]
                silent.worker.attach(asyncio.get_running_loop())
                with pytest.raises(WorkerLostError):
                    await come(silent.read(sha256, ids))
                silent.worker.detach()
                silent.worker.close()
            finally:
                host.worker.detach()

        for _ in range(2):
            asyncio.run(ask())
            assert host.read(sha256, ids).result(TIMEOUT_S).tobytes() == right


class TwoHosts:
    """Both halves of a folder of models, each on a host of its own, with a copy of the models."""

    def __init__(self, folder, first, stack):
        self.ports = free_port(), free_port()
        self.rows = [f"127.0.0.1:{port}" for port in self.ports]
        self.models = [folder / f"host{number}" / "ctr" for number in (1, 2)]
        for models in self.models:
            shutil.copytree(first, models / "1")
        self._stack = stack
        self.servers = [self.start(number) for number in (0, 1)]

    def start(self, number):
        options = [
            "--rows-port",
            self.ports[number],
            "--part",
            f"{number + 1}/2",
            "--reload-every",
            0.05,
        ]
        options += [option for each in self.rows for option in ("--rows-at", each)]
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
            if not np.array_equal(np.array(answer.json["scores"]), self.versions.expected[version]):
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
            assert np.array_equal(np.array(answer.json["scores"]), line.expected[first])
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
                and hosts.rows[1] in answer.reason
                and answer.headers["retry-after"] == "1"
            )
            assert time.monotonic() - begun < 5
        hosts.servers[1] = hosts.start(1)
        until(lambda: hosts.ask(0, line.rows).status == 200)
        for number in (0, 1):
            until(lambda number=number: hosts.ask(number, line.rows).status == 200)
            for export in (line, line.few):
                response = hosts.ask(number, export.rows).json["scores"]
                assert np.array_equal(np.array(response), export.expected[third])
