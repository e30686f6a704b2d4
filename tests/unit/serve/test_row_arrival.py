"""Small batches whose rows lie elsewhere.

Asked for and answered in the event loop, which waits for nobody.
"""

import asyncio
import socket
import ssl
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import pibroch as pb
from certificates import openssl
from pibroch.serve.batcher import Batcher
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.parts import ANSWER, REQUEST, Part
from pibroch.serve.predictor import Predictor
from pibroch.serve.row_connection import SWITCHING
from pibroch.serve.row_hosts import ANSWER_TIMEOUT_S, row_hosts
from pibroch.serve.settings import Refusal, ServerLimits
from pibroch.serve.split_rows import RowSplit
from small_run import make_config, train_here

NUM_PARTS = 3


@pytest.fixture(scope="module")
def exported(clicks, tmp_path_factory):
    """An export as ``.folder``; raw ``.columns`` of three rows and ``.expected`` logits."""
    folder = tmp_path_factory.mktemp("arrival")
    run, _ = train_here(make_config(clicks.data, "train.steps=3"), folder / "run")
    (checkpoint,) = (run.path / "checkpoints").glob("step-*")
    export_checkpoint(checkpoint, folder / "export", ExportOptions("int8", shard_bytes=1000))
    whole = pb.Predictor.open(folder / "export")
    columns = {column: [row[column] for row in clicks.rows[:3]] for column in whole.columns}
    expected = whole.logits(whole.encode(columns)).numpy()
    return SimpleNamespace(folder=folder / "export", columns=columns, expected=expected)


class ThreadHost:
    """A host of one part whose connections are threads.

    Args:
        folder: of the export.
        part: its own.
        tls: how it is spoken, where it is.
        piece_bytes: of an answer, which are sent one by one.
        num_answers: on a connection; the next request closes it.
        num_silent_after: answers of all connections, after which it says nothing.
    """

    def __init__(
        self,
        folder,
        part,
        tls=None,
        piece_bytes=1 << 20,
        num_answers=1 << 20,
        num_silent_after=1 << 20,
    ):
        self.part = part
        self.predictor = Predictor.open_split(folder, RowSplit(part))
        self._tls = tls
        self._piece_bytes = piece_bytes
        self._num_answers = num_answers
        self._num_left = num_silent_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://localhost:{self._listener.getsockname()[1]}"
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for each in (self._listener, *self._open):
            each.close()

    def _accept(self):
        while True:
            try:
                accepted, _ = self._listener.accept()
                connection = (
                    self._tls.wrap_socket(accepted, server_side=True) if self._tls else accepted
                )
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, connection.makefile("rb") as stream:
            while stream.readline().strip():
                pass
            connection.sendall(SWITCHING)
            for _ in range(self._num_answers):
                head = stream.read(REQUEST.size)
                if len(head) < REQUEST.size:
                    return
                checksum, count = REQUEST.unpack(head)
                row_ids = np.frombuffer(stream.read(8 * count), "<i8")
                self._num_left -= 1
                if self._num_left < 0:
                    continue
                rows = self.predictor.exported_rows(checksum.hex())
                body = rows.exported(row_ids).tobytes()
                answer = ANSWER.pack(200, len(body)) + body
                for first in range(0, len(answer), self._piece_bytes):
                    connection.sendall(answer[first : first + self._piece_bytes])
            stream.read(REQUEST.size)


@contextmanager
def split_predictor(exported, **options):
    """A predictor that holds the first of the parts; the others' hosts are as the options say."""
    with ExitStack() as stack:
        hosts = [
            ThreadHost(exported.folder, Part(number, NUM_PARTS), **options) for number in (2, 3)
        ]
        for host in hosts:
            stack.callback(host.close)
        urls = ["http://127.0.0.1:9", *(host.url for host in hosts)]
        predictor = Predictor.open_split(
            exported.folder, RowSplit(Part(1, NUM_PARTS), row_hosts(urls))
        )
        yield SimpleNamespace(predictor=predictor, urls=urls)


@pytest.fixture
def handed_over(monkeypatch):
    """Batches that went to the thread."""
    results = []
    hand_over = Batcher._hand_over
    monkeypatch.setattr(
        Batcher, "_hand_over", lambda self, batch: (results.append(batch), hand_over(self, batch))
    )
    return results


async def ask_again(predictor, work, times, kind="logits"):
    batcher = Batcher(ServerLimits())
    try:
        return [await getattr(batcher, kind)(predictor, work) for _ in range(times)]
    finally:
        batcher.close()


@pytest.mark.parametrize("piece_bytes", [1 << 20, 7])
@pytest.mark.parametrize("is_tls", [False, True])
def test_the_loop_asks_on_connections_that_are_open(
    exported, handed_over, tmp_path, monkeypatch, is_tls, piece_bytes
):
    """The first batch opens them, in the thread.

    Whatever pieces an answer comes in, scores have the bits of one host.
    """
    tls = None
    if is_tls:
        certificate = tmp_path / "cert.pem"
        key = tmp_path / "key.pem"
        ec = (
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-addext",
            "subjectAltName=DNS:localhost",
        )
        openssl(
            "req",
            "-x509",
            *ec,
            "-keyout",
            key,
            "-out",
            certificate,
            "-days",
            2,
            "-subj",
            "/CN=localhost",
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with split_predictor(exported, tls=tls, piece_bytes=piece_bytes) as split:
        for actual in asyncio.run(ask_again(split.predictor, exported.columns, 9)):
            assert np.array_equal(actual, exported.expected)
        assert len(handed_over) == 1
        whole = pb.Predictor.open(exported.folder)
        expected = whole.embed(whole.encode(exported.columns)).numpy()
        for actual in asyncio.run(ask_again(split.predictor, exported.columns, 3, "embeddings")):
            # another loop
            assert np.array_equal(actual, expected)


def test_connections_that_are_closed_are_made_anew(exported, handed_over):
    """By the thread; nobody notices."""
    with split_predictor(exported, num_answers=2) as split:
        for result in asyncio.run(ask_again(split.predictor, exported.columns, 8)):
            assert np.array_equal(result, exported.expected)
        assert 4 <= len(handed_over) < 8


def test_a_host_that_says_nothing_is_named_in_time(exported, handed_over):
    """The loop goes on meanwhile; then nobody waits for that host for a moment."""

    async def ask():
        batcher = Batcher(ServerLimits())
        ticks = 0
        times = []

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        try:
            assert np.array_equal(
                await batcher.logits(split.predictor, exported.columns), exported.expected
            )
            handed_over.clear()
            for _ in range(2):
                begun = time.monotonic()
                with pytest.raises(Refusal) as refused:
                    await batcher.logits(split.predictor, exported.columns)
                assert refused.value.status == 503 and any(
                    url in refused.value.reason for url in split.urls[1:]
                )
                times.append(time.monotonic() - begun)
        finally:
            ticking.cancel()
            batcher.close()
        return ticks, times

    with split_predictor(exported, num_silent_after=1) as split:
        ticks, times = asyncio.run(ask())
    assert (
        ANSWER_TIMEOUT_S * 0.9 < times[0] < ANSWER_TIMEOUT_S + 2 and times[1] < ANSWER_TIMEOUT_S / 2
    )
    assert ticks > 20 and len(handed_over) == 1, (
        "the second is refused by the thread, the first by the loop"
    )


def test_what_is_wrong_does_not_spoil_what_it_is_computed_with(exported, handed_over):
    with split_predictor(exported) as split:
        predictor = split.predictor
        whole = pb.Predictor.open(exported.folder)
        one_row = {column: values[:1] for column, values in exported.columns.items()}
        expected = whole.logits(whole.encode(one_row)).numpy()
        wrong = {column: ["no number"] for column in predictor.columns}

        async def ask():
            batcher = Batcher(ServerLimits())
            try:
                await batcher.logits(predictor, one_row)
                return await asyncio.gather(
                    batcher.logits(predictor, wrong),
                    batcher.logits(predictor, one_row),
                    return_exceptions=True,
                )
            finally:
                batcher.close()

        refused, actual = asyncio.run(ask())
        assert isinstance(refused, Refusal) and refused.status == 400
        assert np.array_equal(actual, expected)
