"""What each rank of the topic ``bounded_lag`` does; ranks are processes of this environment, joined over gloo."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import pibroch as pb
from pibroch.config.model import ModelConfig
from pibroch.models import build_model

PR_SET_TIMERSLACK = 29
NUM_TABLES, NUM_ROWS, DIM, NUM_DENSE, BATCH_SIZE = 8, 20_000, 16, 13, 256


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


def collective(rank: int, size: int, nbytes: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds of each synchronous all-to-all of ``nbytes`` a peer, by contender, in turns; k = 0."""
    contenders = groups(0)
    send = torch.randint(0, 256, (size * nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
    outputs = {name: torch.empty_like(send) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, group in contenders.items():
            out = outputs[name]
            dist.barrier()
            for _ in range(max(2, calls // 10)):
                dist.all_to_all_single(out, send, group=group)
            for _ in range(calls):
                start = time.perf_counter()
                dist.all_to_all_single(out, send, group=group)
                times[name].append(time.perf_counter() - start)
    assert torch.equal(*outputs.values()), "bls and gloo differ"
    for group in contenders.values():
        dist.destroy_process_group(group)
    return times


def repeated(rank: int, size: int, nbytes: int, calls: int) -> dict[str, float]:
    """Seconds of so many calls after each other, by contender; k = 0."""
    contenders, found = groups(0), {}
    send, out = torch.zeros(size * nbytes, dtype=torch.uint8), torch.empty(size * nbytes, dtype=torch.uint8)
    for name, group in contenders.items():
        dist.all_to_all_single(out, send, group=group)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_to_all_single(out, send, group=group)
        found[name] = time.perf_counter() - start
        dist.destroy_process_group(group)
    return found


def delayed(rank: int, size: int, name: str, bound: int, delays: Sequence[float]) -> tuple[float, list[float]]:
    """Seconds of one all-to-all a step behind a delay, at most k outstanding, and the delays as they were."""
    group = groups(bound)[name]
    send = torch.zeros(size * 1024)
    outputs = deque(torch.empty_like(send) for _ in range(bound + 2))
    works: deque[Any] = deque()
    dist.all_to_all_single(outputs[0], send, group=group)
    for _ in range(3):
        dist.barrier()
    slept, start = [], time.perf_counter()
    for delay in delays:
        before = time.perf_counter()
        time.sleep(delay)
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


def pipelined(rank: int, size: int, transport: str, bound: int, delays: Sequence[float]) -> tuple[float, bool]:
    """Seconds of inference with a delay in each step, and whether its predictions are those of synchronous inference."""
    tables = [pb.Table(f"C{number}", NUM_ROWS, DIM) for number in range(NUM_TABLES)]
    embeddings = pb.Embeddings(tables, pb.SGD(lr=1.0), "alltoall").eval()
    torch.manual_seed(0)
    config = ModelConfig(name="dlrm", dim=DIM, bottom=(64,), top=(64,))
    model = build_model(config, NUM_DENSE, NUM_TABLES).eval()
    batches = [_batch(rank, number) for number in range(16)]
    with torch.no_grad():
        wanted = [model(batch.dense, embeddings(batch)) for batch in batches]
    pipeline = pb.BoundedLagPipeline(model, embeddings, bound, transport)
    list(pipeline.run(batches))
    dist.barrier()
    start, done = time.perf_counter(), []
    for number, delay in enumerate(delays):
        time.sleep(delay)
        done += pipeline.submit(batches[number % len(batches)])
    done += pipeline.drain()
    taken = time.perf_counter() - start
    same = all(
        torch.equal(each.logits, wanted[number % len(batches)])
        for number, each in enumerate(done)
        if each.logits is not None
    )
    dist.barrier()
    pipeline.close()
    return taken, same and len(done) == len(delays)


def _batch(rank: int, number: int) -> pb.JaggedBatch:
    draw = np.random.default_rng([rank, number])
    ids = torch.from_numpy((draw.zipf(1.2, (NUM_TABLES, BATCH_SIZE)) - 1) % NUM_ROWS)
    dense = torch.from_numpy(draw.standard_normal((BATCH_SIZE, NUM_DENSE), np.float32))
    return pb.JaggedBatch.from_one_hot(dense, [f"C{each}" for each in range(NUM_TABLES)], ids, torch.zeros(BATCH_SIZE))
