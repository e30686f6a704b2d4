"""What each rank of the topic ``bounded_lag`` does.

Ranks are processes of this environment, joined over gloo.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

import pibroch as pb
from benchmarks.lagged_data import NUM_ROWS
from benchmarks.workers.channel_training import trained  # noqa: F401, asked for by name
from benchmarks.workers.gloo_streams import open_over_gloo
from benchmarks.workers.pmi import start_without_mpiexec
from pibroch.collectives.bounded_lag.base import Opening, RankParts, Slot
from pibroch.collectives.bounded_lag.mpi_start import start_mpi
from pibroch.collectives.bounded_lag.opening import OPENERS, open_lagged_transport
from pibroch.collectives.bounded_lag.shared_memory import SharedMemoryTransport
from pibroch.config.model import DLRMConfig
from pibroch.errors import MissingDependencyError
from pibroch.models import build_model
from pibroch.observability import trace

OPENERS["gloo"] = open_over_gloo
Call = Callable[[torch.Tensor, torch.Tensor], Any]

PR_SET_TIMERSLACK = 29
AWAKE_S = 0.0001
DIM = 16


def serve(pipe: Any, rank: int, size: int, port: int) -> None:
    """Join, then run functions of this module until the pipe closes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # delays as long as they were drawn
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(globals()[name](rank, size, *arguments))


def groups(bound: int) -> dict[str, Any]:
    """The contenders."""
    return {
        "bls": dist.new_group(backend="bls", pg_options=pb.BoundedLagOptions(bound=bound)),
        "gloo": dist.new_group(backend="gloo"),
    }


class Views:
    """All-to-all over pibroch's transport whose results are looked at where they lie.

    Nothing is copied out.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        options = pb.BoundedLagOptions(bound=0)
        self._rank = rank
        self._transport = open_lagged_transport(
            Opening(store, rank, range(size), 2, options, 300.0)
        )
        self._number = self._seen = 0

    def __call__(self, out: torch.Tensor, send: torch.Tensor) -> list[Any]:
        """The parts by rank; this rank's own is what it sends."""
        transport = self._transport
        slot = Slot(0, self._number)
        parts = send.numpy().reshape(self.size, -1)
        transport.put(slot, RankParts.of(list(parts)))
        while not all(transport.has_arrived(slot, p) for p in transport.peers):
            self._seen = transport.wait_for_news(self._seen, slot)
        self._number += 1
        return [parts[p] if p == self._rank else transport.view(slot, p) for p in range(self.size)]

    @property
    def size(self) -> int:
        """Ranks."""
        return self._transport.world_size

    def close(self) -> None:
        """Give slots back."""
        self._transport.close()


def _mpich(rank: int, size: int) -> Call | None:
    """``MPI_Alltoallv`` from Python; ``None`` without MPI."""
    try:
        start_without_mpiexec(PrefixStore("bench/pmi", _get_default_store()), rank, size)
        mpi = start_mpi(rank, size)
    except MissingDependencyError:
        return None
    world = mpi.COMM_WORLD

    def call(out: torch.Tensor, send: torch.Tensor) -> None:
        counts = [len(send) // size] * size
        starts = [len(send) // size * place for place in range(size)]
        world.Alltoallv(
            [send.numpy(), counts, starts, mpi.BYTE], [out.numpy(), counts, starts, mpi.BYTE]
        )

    return call


_numbers = itertools.count()


def _contenders(rank: int, size: int) -> tuple[dict[str, Call], Callable[[], None]]:
    """Synchronous all-to-alls by name, and what gives them back."""
    made = groups(0)
    views = Views(rank, size, PrefixStore(f"bench/views/{next(_numbers)}", _get_default_store()))
    calls: dict[str, Call] = {
        name: partial(dist.all_to_all_single, group=group) for name, group in made.items()
    }
    mpich = _mpich(rank, size)
    calls |= {"views": views} | ({} if mpich is None else {"mpich": mpich})

    def close() -> None:
        dist.barrier()
        views.close()
        for group in made.values():
            dist.destroy_process_group(group)

    return calls, close


def collective(
    rank: int, size: int, nbytes: int, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds of each synchronous all-to-all of ``nbytes`` a peer, by contender; k = 0.

    Contenders take turns.
    """
    contenders, close = _contenders(rank, size)
    send = torch.randint(
        0, 256, (size * nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank)
    )
    outputs = {name: torch.empty_like(send) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            out = outputs[name]
            dist.barrier()
            for _ in range(max(2, calls // 10)):
                call(out, send)
            for _ in range(calls):
                start = time.perf_counter()
                result = call(out, send)
                times[name].append(time.perf_counter() - start)
            if name == "views":
                out.copy_(torch.from_numpy(np.concatenate(result)))
    assert all(torch.equal(out, outputs["gloo"]) for out in outputs.values()), "contenders differ"
    close()
    return times


def repeated(rank: int, size: int, nbytes: int, calls: int) -> dict[str, float]:
    """Seconds of so many calls after each other, by contender; k = 0."""
    (contenders, close) = _contenders(rank, size)
    results = {}
    send = torch.zeros(size * nbytes, dtype=torch.uint8)
    out = torch.empty(size * nbytes, dtype=torch.uint8)
    for name, call in contenders.items():
        call(out, send)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call(out, send)
        results[name] = time.perf_counter() - start
    close()
    return results


def _delay(seconds: float) -> None:
    """Wait as long as was drawn.

    A sleep ends some 0.06 ms late, so the last tenth of a millisecond is spent looking at the
    clock.
    """
    end = time.perf_counter() + seconds
    if seconds > AWAKE_S:
        time.sleep(seconds - AWAKE_S)
    while time.perf_counter() < end:
        pass


def delayed(
    rank: int, size: int, name: str, bound: int, delays: Sequence[float]
) -> tuple[float, list[float]]:
    """Seconds of one all-to-all a step behind a delay, and the delays that there were.

    At most k are outstanding.
    """
    group = groups(bound)[name]
    send = torch.zeros(size * 1024)
    outputs = deque(torch.empty_like(send) for _ in range(bound + 2))
    works: deque[Any] = deque()
    dist.all_to_all_single(outputs[0], send, group=group)
    for _ in range(3):
        dist.barrier()
    slept = []
    start = time.perf_counter()
    for delay in delays:
        before = time.perf_counter()
        _delay(delay)
        slept.append(time.perf_counter() - before)
        if name != "bls":
            while len(works) >= max(bound, 1):
                works.popleft().wait()
        works.append(dist.all_to_all_single(outputs[0], send, group=group, async_op=True))
        outputs.rotate()
        while len(works) > bound:
            works.popleft().wait()
    while works:
        works.popleft().wait()
    taken = time.perf_counter() - start
    dist.barrier()
    return taken, slept


def _model(path: str, rank: int, size: int) -> tuple[Any, pb.Embeddings, list[pb.JaggedBatch]]:
    """A DLRM, tables by rows, and the batches of this rank."""
    with np.load(path) as arrays:
        ids = arrays["ids"]
        lengths = arrays["lengths"]
        dense = arrays["dense"]
    keys = tuple(f"C{number}" for number in range(lengths.shape[1]))
    embeddings = pb.Embeddings(
        [pb.Table(key, NUM_ROWS, DIM) for key in keys], pb.SGD(lr=1.0), "alltoall"
    ).eval()
    torch.manual_seed(0)
    config = DLRMConfig(dim=DIM, bottom=(64,), top=(64,))
    model = build_model(config, dense.shape[2], len(keys)).eval()
    ends = np.cumsum(lengths.sum((1, 2)))
    batches = []
    for number in range(rank, len(lengths), size):
        first = ends[number] - lengths[number].sum()
        after = ends[number]
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[number].reshape(-1))]))
        values = torch.from_numpy(ids[first:after])
        features = torch.from_numpy(dense[number])
        batches.append(pb.JaggedBatch(features, keys, values, offsets, torch.zeros(len(features))))
    for _ in range(len(lengths) // size, len(batches)):
        batches.pop()  # as many on all ranks
    return model, embeddings, batches


def pipelined(
    rank: int,
    size: int,
    path: str,
    transport: str,
    bound: int,
    delays: Sequence[float],
    traced_from: int | None = None,
) -> dict[str, Any]:
    """Inference with a delay in each step.

    Seconds, whether predictions are those of synchronous inference, and spans.
    """
    model, embeddings, batches = _model(path, rank, size)
    with torch.no_grad():
        wanted = [model(batch.dense, embeddings(batch)) for batch in batches]
    pipeline = pb.BoundedLagPipeline(model, embeddings, bound, transport)
    list(pipeline.run(batches[:16]))
    dist.barrier()
    start = time.perf_counter()
    done = []
    chart = None
    for number, delay in enumerate(delays):
        if number == traced_from:
            chart = trace.start(f"rank {rank}")
        if delay:
            with trace.span("delay"):
                _delay(delay)
        done += pipeline.submit(batches[number % len(batches)])
    done += pipeline.drain()
    taken = time.perf_counter() - start
    spans = [] if chart is None else [(name, begin, end) for name, _, begin, end in chart._events]
    if chart is not None:
        trace.stop()
    same = len(done) == len(delays) and all(
        each.logits is not None and torch.equal(each.logits, wanted[number % len(batches)])
        for number, each in enumerate(done)
    )
    dist.barrier()
    pipeline.close()
    return {"seconds": taken, "same": same, "spans": spans}


def remembered(rank: int, size: int, path: str, bound: int) -> dict[str, int]:
    """Bytes of a pipeline's slots and segments, and of its largest messages.

    Those are of a batch and of a dense result.
    """
    model, embeddings, batches = _model(path, rank, size)
    pipeline = pb.BoundedLagPipeline(model, embeddings, bound)
    before = embeddings.ranks.traffic.received
    largest = 0
    for number in range(64):
        pipeline.submit(batches[number % len(batches)])
        received = embeddings.ranks.traffic.received
        largest = max(largest, received - before)
        before = received
    pipeline.drain()
    transport = pipeline._transport
    assert isinstance(transport, SharedMemoryTransport)
    slots = transport.num_slot_bytes
    dist.barrier()
    pipeline.close()
    dense = model.begin(batches[0].dense).nbytes
    return {
        "slots": slots,
        "overflow": transport.num_bytes - slots,
        "received": largest,
        "dense": dense,
    }
