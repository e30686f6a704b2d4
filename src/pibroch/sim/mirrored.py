"""Steps of very many ranks, counted at a few: each is answered as it asks.

Where rows are spread evenly, a rank gives to the others about as much as it gets from them. So one
rank's generators run alone, and each message is answered by one of the same counts. Bytes of each
of the others follow from means over the ranks that were looked at, which are said with their error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pibroch.errors import ConfigError
from pibroch.exchange.alltoall.lane import Lane
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.layout import lay_out
from pibroch.exchange.messages import Counts, Message, Messages, Received, Values, joined
from pibroch.exchange.rows import room_for
from pibroch.exchange.wire import RowWire
from pibroch.sim.cluster import Flow
from pibroch.sim.counting import LEARNING_RATE, Job, StepCount, of_ranks
from pibroch.sim.held import held_bytes
from pibroch.sim.lockstep import FEATURES, Operation, size_of, tensor_of, virtual_wire

T = TypeVar("T")
EXACT_RANKS = 32
"""Up to so many all are counted."""
RANKS_LOOKED_AT = 6


def count_few(job: Job, ranks_per_host: int, num_steps: int) -> tuple[list[StepCount], float]:
    """Steps of ``alltoall`` of all ranks, from those of a few.

    Args:
        job: with rows that are spread evenly over all ranks.
        ranks_per_host: of each host, which their messages do not leave.
        num_steps: that are counted.

    Returns:
        The steps, and the relative standard error of their bytes.

    Raises:
        ConfigError: for a placement that gives ranks unlike loads.
    """
    uneven = [name for name, each in job.plan.placements.items() if each.kind != "row_wise"]
    if uneven:
        raise ConfigError(
            f"table {uneven[0]!r} placed {job.plan.placements[uneven[0]].kind} on"
            f" {job.num_ranks:,} ranks",
            f"row_wise for more than {EXACT_RANKS} ranks, of which a few are looked at",
            "pass --set embedding.exchange.placement=row_wise",
        )
    size = job.num_ranks
    looked_at = np.linspace(0, size - 1, RANKS_LOOKED_AT).astype(int).tolist()
    layouts = [lay_out(each.space, job.plan, 0)[0] for each in job.groups]
    steps = []
    totals = []
    for number in range(num_steps):
        done = []
        for rank in looked_at:
            wire = virtual_wire(rank, size, job.wire)
            lanes = [
                RowLane(layout, group, None, wire, make_room=job.make_room)
                for layout, group in zip(layouts, job.groups, strict=True)
            ]
            if not all(len(lane.shard.records) for lane in lanes):
                raise ConfigError(
                    f"{size:,} ranks, of which some have no row of a group of tables",
                    "at least one row of each a rank",
                    "lower --hosts",
                )
            done.append(_step(job, lanes, number, rank))
        steps.append(of_all(done, size, ranks_per_host))
        totals += [sum(sum(each.sent) for each in operations) for operations, _ in done]
    error = float(np.std(totals, ddof=1) / np.sqrt(len(totals)) / max(1.0, np.mean(totals)))
    return steps, error


def _step(
    job: Job, lanes: Sequence[Lane], number: int, rank: int
) -> tuple[list[OfOneRank], dict[str, int]]:
    """What one rank does, and bytes that it holds meanwhile."""
    batch = job.batch_of(number, rank)
    ids = batch.values.numel()
    width = float(np.mean([lane.layout.width for lane in lanes]))
    routes, routed = _mirrored("route", [lane.route(batch) for lane in lanes], lanes, ids, width)
    rows, fetched = _mirrored("fetch", [route.fetch(None) for route in routes], lanes, ids, width)
    sums = [torch.zeros(len(each), each.shape[1]) for each in rows]
    held = {
        "batches": 2 * held_bytes(batch, routes, but=lanes),
        "messages": held_bytes(rows, sums) + 2 * held_bytes(room_for(job.groups, batch)),
    }
    updates = [
        route.update(total, LEARNING_RATE, number + 1)
        for route, total in zip(routes, sums, strict=True)
    ]
    _, updated = _mirrored("update", updates, lanes, ids, width)
    num_rows = sum(map(len, rows))
    read = OfOneRank("read", [(ids, 0, 0, 0, 0)], [])
    about = [(ids, num_rows, 4 * width * num_rows, 0, 4 * width * ids)]
    own = [OfOneRank(name, about, []) for name in ("pool", "combine")]
    return [read, routed, fetched, *own, updated], held


class OfOneRank:
    """An operation of one rank, which stands for all.

    Attributes:
        name: of it.
        parts: what its parts are about, see :data:`FEATURES`.
        sent: bytes to all other ranks of its messages.
    """

    def __init__(self, name: str, parts: Sequence[tuple[float, ...]], sent: list[float]) -> None:
        self.name = name
        self.parts = parts
        self.sent = sent


def _mirrored(
    name: str,
    generators: Sequence[Messages[T]],
    lanes: Sequence[Lane],
    ids: int,
    width: float,
) -> tuple[list[T], OfOneRank]:
    """One rank's generators, each message answered by one of the same counts."""
    wire = lanes[0].wire
    run = joined(generators)
    num_rows = min(len(lane.shard.records) for lane in lanes)
    parts: list[tuple[float, ...]] = []
    sent: list[float] = []
    answers: list[Received] | None = None
    came: tuple[float, float] = (0.0, 0.0)
    while True:
        try:
            messages = next(run) if answers is None else run.send(answers)
        except StopIteration as end:
            parts.append((0 if answers else ids, *came, 0, 0))
            return end.value, OfOneRank(name, parts, sent)
        going = size_of([tensor_of(each) for each in messages], width)
        parts.append((0 if answers else ids, *came, *going))
        sent.append(float(sum(_to_others(each, wire) for each in messages)))
        answers = [Received(_answer(each, wire, num_rows)) for each in messages]
        came = size_of([each.tensor for each in answers], width)


def _answer(message: Message, wire: RowWire, num_rows: int) -> Tensor:
    if isinstance(message, Counts):
        return message.numbers
    tensor = tensor_of(message)
    if isinstance(message, Values):  # rows that others ask for, of as many as there are here
        assert list(message.receive_counts) == list(message.send_counts)
        return tensor.clamp(max=num_rows - 1)  # other shards may have a few more
    return tensor.to(wire.dtype).to(tensor.dtype)


def _to_others(message: Message, wire: RowWire) -> float:
    tensor = tensor_of(message)
    rank = wire.channel.ranks.rank
    if isinstance(message, Counts):
        return (len(tensor) - 1) * tensor[0].nbytes
    counts = message.send_counts  # type: ignore[union-attr]
    per_row = tensor.nbytes / max(1, len(tensor))
    narrow = 1.0 if isinstance(message, Values) else wire.dtype.itemsize / 4
    return float(narrow * per_row * (sum(counts) - counts[rank]))


def of_all(
    of_few: Sequence[tuple[Sequence[OfOneRank], dict[str, int]]], size: int, per_host: int
) -> StepCount:
    """All ranks as the mean of those that were looked at.

    Args:
        of_few: what each of these does, in one order, and bytes that it holds by name.
        size: of all ranks.
        per_host: ranks, whose messages to each other do not leave their host.
    """
    near = (per_host - 1) / (size - 1)
    operations = []
    for alike in zip(*(done for done, _ in of_few), strict=True):
        parts = np.mean([each.parts for each in alike], axis=0)
        flows: list[Flow] = []
        for amount in np.mean([each.sent for each in alike], axis=0) if alike[0].sent else ():
            across, local = (np.full(size, amount * share) for share in (1 - near, near))
            flows.append(Flow(across, across, local, local))
        every = [np.broadcast_to(part, (size, len(FEATURES))) for part in parts]
        operations.append(Operation(alike[0].name, every, flows))
    mean = {
        name: round(float(np.mean([held[name] for _, held in of_few]))) for name in of_few[0][1]
    }
    return StepCount(operations, held=of_ranks([mean] * size, operations))
