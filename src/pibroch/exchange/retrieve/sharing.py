"""Shards and copies of a host, given to each lane of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pibroch.exchange.retrieve.copies import CopyRows, LaneCopies
from pibroch.exchange.retrieve.host_memory import HostMemory, NeighbourRows
from pibroch.exchange.retrieve.lane import RetrieveLane
from pibroch.kernels.arrays import Records


def share(host: HostMemory, lanes: Sequence[RetrieveLane]) -> None:
    """Give each lane the shards and the copies of this host."""
    own = {
        lane: _room_for_copies(host, lane, lane.copies) for lane in lanes if lane.copies is not None
    }
    memory = host.trade()
    for number, lane in enumerate(lanes):
        lane.near = {lane.rank: lane.shard}
        for p, of_rank in memory.items():
            num_bytes = lane.shard.records[:1].nbytes * int(np.diff(lane.layout.bounds)[p])
            lane.near[p] = NeighbourRows.of(of_rank[number][:num_bytes], lane.shard)
        lane.near = dict(sorted(lane.near.items()))
    for number, (lane, rows) in enumerate(own.items(), len(lanes)):
        copies = lane.copies
        dim = lane.layout.width
        assert copies is not None, "chosen by it"
        copied = {}
        for holder, p in enumerate(lane.near):
            floats = len(copies.sources[holder]) * copies.width(dim)
            held = rows if p == lane.rank else memory[p][number][: 4 * floats].view(np.float32)
            copied[lane.world_size + holder] = CopyRows.of(
                held.reshape(-1, copies.width(dim)), dim, copies.dtype
            )
        lane.copied = copied


def _room_for_copies(host: HostMemory, lane: RetrieveLane, copies: LaneCopies) -> Records:
    own = sorted((*host.neighbours, lane.rank)).index(lane.rank)
    return host.room(len(copies.sources[own]), copies.width(lane.layout.width))
