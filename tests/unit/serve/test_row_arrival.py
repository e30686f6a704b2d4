"""Small batches whose rows lie elsewhere.

Asked for and answered in the event loop, which waits for nobody.
"""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

import pibroch as pb
from certificates import authority, signed
from here_host import HereHost
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.rows import RowWorker
from pibroch.serve.batcher import Batcher
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.parts import ANSWER_TIMEOUT_S, Part, by_ids
from pibroch.serve.predictor import Predictor
from pibroch.serve.row_hosts import RowAccess, row_hosts
from pibroch.serve.settings import Refusal, ServerLimits
from pibroch.serve.split_rows import RowSplit
from small_run import make_config, train_here

NUM_PARTS = 3
ACCESS = RowAccess(b"the secret of these hosts alone!")


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


class Host:
    """A host of one part, which one reaches through a proxy.

    Args:
        folder: of the export.
        part: its own.
        access: how it lets others in.
        piece_bytes: of an answer, which travel one by one.
        num_silent_after: answers after which it says nothing.
    """

    def __init__(self, folder, part, access, piece_bytes=1 << 20, num_silent_after=1 << 20):
        self.here = HereHost(folder, part)
        self._piece_bytes = piece_bytes
        self._num_left = num_silent_after
        self._is_over = threading.Event()
        me = WorkerInfo(part.worker, part.number)
        at = "127.0.0.1", 0
        self._worker = RowWorker(me, access.secret, {}, by_ids(self._give), at, access.tls)
        self._worker.start()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._is_over.set()
        self.drop()
        self._listener.close()
        self._worker.close()

    def drop(self):
        """End all connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _give(self, sha256, ids):
        self._num_left -= 1
        if self._num_left < 0:
            self._is_over.wait(60)
        return self.here.give(sha256, ids)

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._worker.port))
                self._open += [near, far]
                for source, target, size in ((near, far, 1 << 20), (far, near, self._piece_bytes)):
                    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(
                        target=pass_on, args=(source, target, size), daemon=True
                    ).start()


def pass_on(source, target, piece_bytes):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            for first in range(0, len(data), piece_bytes):
                target.sendall(data[first : first + piece_bytes])
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def split_predictor(exported, access=ACCESS, **options):
    """A predictor that holds the first of the parts; the others' hosts are as the options say."""
    with ExitStack() as stack:
        hosts = [
            Host(exported.folder, Part(number, NUM_PARTS), access, **options) for number in (2, 3)
        ]
        for host in hosts:
            stack.callback(host.close)
        addresses = ["127.0.0.1:9", *(host.address for host in hosts)]
        sources = row_hosts(addresses, access)
        stack.callback(sources[0].worker.close)
        predictor = Predictor.open(exported.folder, split=RowSplit(Part(1, NUM_PARTS), sources))
        yield SimpleNamespace(
            predictor=predictor, addresses=addresses, hosts=hosts, worker=sources[0].worker
        )


@pytest.fixture
def handed_over(monkeypatch):
    """Batches that went to the thread."""
    results = []
    hand_over = Batcher._hand_over
    monkeypatch.setattr(
        Batcher, "_hand_over", lambda self, batch: (results.append(batch), hand_over(self, batch))
    )
    return results


async def ask_again(predictor, work, times, kind="logits", worker=None):
    batcher = Batcher(ServerLimits())
    if worker is not None:
        worker.attach(asyncio.get_running_loop())
    try:
        return [await getattr(batcher, kind)(predictor, work) for _ in range(times)]
    finally:
        batcher.close()
        if worker is not None:
            worker.detach()


@pytest.mark.parametrize("piece_bytes", [1 << 20, 7])
@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("is_attached", [False, True])
def test_the_loop_asks(exported, handed_over, tmp_path, is_attached, is_tls, piece_bytes):
    """Whatever pieces an answer comes in, scores have the bits of one host."""
    files = None
    if is_tls:
        files = signed(tmp_path, "host", authority(tmp_path, "ours"))
    with split_predictor(
        exported, RowAccess(ACCESS.secret, files), piece_bytes=piece_bytes
    ) as split:
        worker = split.worker if is_attached else None
        for actual in asyncio.run(ask_again(split.predictor, exported.columns, 9, worker=worker)):
            assert np.array_equal(actual, exported.expected)
        assert not handed_over
        whole = pb.Predictor.open(exported.folder)
        expected = whole.embed(whole.encode(exported.columns)).numpy()
        for actual in asyncio.run(
            ask_again(split.predictor, exported.columns, 3, "embeddings", worker)
        ):
            # another loop
            assert np.array_equal(actual, expected)


def test_connections_that_are_closed_are_made_anew(exported, handed_over):
    """By the loop; nobody notices."""
    with split_predictor(exported) as split:
        for _ in range(4):
            for result in asyncio.run(ask_again(split.predictor, exported.columns, 2)):
                assert np.array_equal(result, exported.expected)
            split.hosts[0].drop()
        assert not handed_over


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
            for _ in range(2):
                begun = time.monotonic()
                with pytest.raises(Refusal) as refused:
                    await batcher.logits(split.predictor, exported.columns)
                assert refused.value.status == 503 and any(
                    each in refused.value.reason for each in split.addresses[1:]
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
    assert ticks > 20 and not handed_over


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
