"""What a byte costs on its way between ranks, measured on ranks that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.collectives.topology import Topology
from pibroch.kernels import route as routing

MESSAGE_BYTES = 4 << 20
ROW_FLOATS = 64
NUM_ROWS = 1 << 18
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, in seconds for a byte.

    Attributes:
        host_of_rank: for each rank.
        read: ``[W, W]``: of bytes that rank i gets from rank j; on the diagonal, of rows at random
            places in own memory.
        all_reduce: of a byte of a tensor that all ranks sum; 0 for one rank.
    """

    host_of_rank: tuple[int, ...]
    read: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    all_reduce: float

    def content(self) -> dict[str, object]:
        """The keys of a file that :meth:`pibroch.planner.topology.ClusterTopology.load` reads.

        Costs are relative to the quickest link, rounded to three digits; own memory never costs
        more than a link.
        """
        others = ~np.eye(len(self.read), dtype=np.bool_)
        unit = self.read[others].min() if others.any() else float(self.read[0, 0])
        cost = self.read / unit
        least = np.where(others, cost, np.inf).min(1) if others.any() else np.full(1, np.inf)
        np.fill_diagonal(cost, np.minimum(np.diag(cost), 0.99 * least))
        measured: dict[str, object] = {
            "host_of_rank": list(self.host_of_rank),
            "cost": [[float(f"{number:.3g}") for number in row] for row in cost],
        }
        if others.any():
            measured["p2p_bandwidth"] = float(f"{1 / np.median(self.read[others]):.3g}")
            measured["all_reduce_bandwidth"] = float(f"{1 / self.all_reduce:.3g}")
        return measured


def measure(channel: Channel, advance: Callable[[], None] = lambda: None) -> Measured:
    """Measure all pairs of ranks, one pair at a time, own memory, and the sum over all.

    Every rank calls it.

    Args:
        channel: between the ranks.
        advance: is called after each of ``W (W - 1) / 2`` pairs.
    """
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    hosts = Topology.gather(channel).host_of_rank
    own = np.zeros(size)
    own[rank] = _own_memory()
    for left in range(size):
        for right in range(left + 1, size):
            channel.barrier()
            if rank in (left, right):
                other = left + right - rank
                own[other] = _pair(channel, other)
            advance()
    channel.barrier()
    all_reduce = _all_reduce(channel) if size > 1 else 0.0
    rows: Sequence[list[float]] = channel.gather(own.tolist())
    slowest = max(channel.gather(all_reduce))
    return Measured(hosts, np.array(rows), slowest)


def _own_memory() -> float:
    rng = np.random.default_rng(0)
    records = np.zeros((NUM_ROWS, ROW_FLOATS), np.float32)
    rows = rng.permutation(NUM_ROWS)[: NUM_ROWS // 4]
    out = np.empty((NUM_ROWS // 4, ROW_FLOATS), np.float32)
    return _best(lambda: routing.gather_rows(records, rows, out)) / out.nbytes


def _pair(channel: Channel, other: int) -> float:
    size = channel.ranks.world_size
    nothing = torch.empty(0, dtype=torch.uint8)
    going = [
        torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) if p == other else nothing
        for p in range(size)
    ]
    coming = [
        torch.empty(MESSAGE_BYTES, dtype=torch.uint8) if p == other else nothing
        for p in range(size)
    ]
    return _best(lambda: channel.begin_all_to_all(going, coming)()) / MESSAGE_BYTES


def _all_reduce(channel: Channel) -> float:
    summed = torch.zeros(MESSAGE_BYTES // 4)
    return _best(lambda: channel.all_reduce(summed)()) / MESSAGE_BYTES


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest round, after one that warms up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
