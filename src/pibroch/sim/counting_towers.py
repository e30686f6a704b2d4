"""What ranks do in steps of ``towers``, counted as in :mod:`pibroch.sim.counting`.

Messages between peers are those of all ranks, those inside a group of hosts of its members alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pibroch.exchange.alltoall.build import groups_under
from pibroch.exchange.base import Rates
from pibroch.exchange.messages import Joined, Messages, joined
from pibroch.exchange.towers.build import TowerLayout, Towers
from pibroch.exchange.towers.peer_lookup import PeerBatch, PeerIds, PeerLookup
from pibroch.exchange.towers.places import TowerPlaces, hosts_of
from pibroch.exchange.towers.tables import TablesHere, within
from pibroch.exchange.wire import RowWire
from pibroch.planner import Plan
from pibroch.sim.alone import RowRuns
from pibroch.sim.counting import GRADIENT, LEARNING_RATE, Job, StepCount, of_ranks, timed
from pibroch.sim.held import held_bytes
from pibroch.sim.lockstep import Clock, Operation, beside, lockstep, virtual_wire
from pibroch.sim.timeline import Floats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlacedModules:
    """Modules of towers, on the ranks that have their tables, by group of hosts.

    Attributes:
        widths: numbers a sample that they give.
        work: their share of the work of all.
        num_bytes: of their parameters.
    """

    widths: Sequence[int]
    work: Sequence[float]
    num_bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class ByTowers:
    """Which ranks look up which tables.

    Attributes:
        places: groups of hosts.
        tables: of each of them.
        modules: between the halves of a lookup; ``None`` for towers that pass through.
    """

    places: TowerPlaces
    tables: Sequence[TablesHere]
    modules: PlacedModules | None = None

    @property
    def work(self) -> Floats:
        """Of each rank's modules, by that of all towers on the samples of one rank, ``[W]``."""
        places = self.places
        shares = np.zeros(places.num_ranks)
        if self.modules is not None:
            for rank in range(places.num_ranks):
                shares[rank] = self.modules.work[places.group_of(rank)]
                shares[rank] *= len(places.served_by(rank))
        return shares


def plan_of(layout: TowerLayout) -> Plan:
    """Where rows lie over all ranks, from the plans of the groups of hosts.

    Raises:
        ConfigError: for a placement or plan that does not fit.
    """
    placements = {}
    for number, members in enumerate(layout.places.groups):
        for name, each in layout.plan_inside(number).placements.items():
            shards = tuple(members[shard] for shard in each.shards)
            placements[name] = each.model_copy(update={"shards": shards})
    return Plan(num_shards=layout.places.num_ranks, placements=placements)


def ranks_as_hosts(job: Job) -> tuple[Job, ByTowers] | None:
    """The job under ``towers`` where each rank is a host; ``None`` for tables of one tower."""
    layout = TowerLayout.of(Towers(), job.groups, hosts_of(job.num_ranks, 1))
    if len(layout.places.groups) == 1:
        return None
    return replace(job, plan=plan_of(layout)), ByTowers(layout.places, layout.here)


def count_towers(
    job: Job, towers: ByTowers, num_steps: int, clock: Clock | None = None
) -> list[StepCount]:
    """Steps of ``towers``, one by one.

    Args:
        job: what is trained, with a plan that keeps tables to their towers, see :func:`plan_of`.
        towers: who looks up what.
        num_steps: that are counted.
        clock: to time the work.
    """
    ranks = _Ranks(job, towers, clock)
    return [ranks.step(number) for number in range(num_steps)]


class _Ranks:
    """All ranks."""

    def __init__(self, job: Job, towers: ByTowers, clock: Clock | None) -> None:
        self._job = job
        self._towers = towers
        self._clock = clock
        self._ranks = range(job.num_ranks)
        self._wires = [virtual_wire(rank, job.num_ranks, job.wire) for rank in self._ranks]
        self._peers = [_peer(job, towers, wire) for wire in self._wires]
        lanes = [lane for peer in self._peers for lane in peer.lanes]
        self._width = float(np.mean([lane.layout.width for lane in lanes]))
        self._of_rows = RowRuns(job.has_numbers, self._width, clock)

    def step(self, number: int) -> StepCount:
        """Take a step, from 0."""
        peers = self._peers
        job = self._job
        batches, read = self._timed("read", partial(job.batch_of, number))
        num_ids = [batch.values.numel() for batch in batches]
        read.parts[0][:, 0] = num_ids
        ids, announced = self._outside(
            "peer ids", lambda rank: peers[rank].announce(batches[rank], True), num_ids
        )
        of_slots = list(map(_num_ids, ids))
        routes, routed = self._inside(
            "tower route", lambda rank: peers[rank].route(ids[rank]), of_slots
        )
        by_slot, fetched = self._inside(
            "tower fetch", lambda rank: peers[rank].fetch(routes[rank], job.read_at), of_slots, True
        )
        fetched.parts[-1][:, 0] = of_slots  # which it pools
        if self._towers.modules is None:
            gradients, halves = self._home(routes, by_slot)
            shares = routes[0].shares
        else:
            gradients, halves = self._through_modules(self._towers.modules.widths, routes, by_slot)
            shares = None
        rates = Rates([LEARNING_RATE] * len(job.groups), number + 1)
        _, updated = self._inside(
            "tower update",
            lambda rank: peers[rank].update(
                routes[rank], self._of_rows.given(gradients[rank]), rates, shares
            ),
            of_slots,
            True,
        )
        operations = [read, announced, routed, fetched, *halves, updated]
        held = [
            # a batch and the next one
            {
                "batches": 2 * held_bytes(batches[rank], routes[rank], but=peers[rank].lanes),
                "messages": held_bytes(by_slot[rank], gradients[rank]),
            }
            for rank in self._ranks
        ]
        return StepCount(operations, held=of_ranks(held, operations))

    def _home(
        self, routes: Sequence[PeerBatch], by_slot: Sequence[list[list[Tensor]]]
    ) -> tuple[list[list[list[Tensor]]], list[Operation]]:
        """Embeddings of each rank's samples, and the gradients of the slots'."""
        peers = self._peers
        of_rows = self._of_rows
        parts, home = self._send_rows(
            "embeddings",
            lambda rank: peers[rank].embeddings_home(routes[rank], of_rows.given(by_slot[rank])),
        )
        came = list(map(of_rows.given, parts))
        whole, put = self._timed(
            "put", lambda rank: of_rows.kept(peers[rank].put(routes[rank].batch, came[rank]))
        )
        given = [of_rows.gradients(own, GRADIENT) for own in whole]
        taken, take = self._timed(
            "take", lambda rank: of_rows.kept(peers[rank].take(routes[rank].batch, given[rank]))
        )
        for rank in self._ranks:
            num_bytes = sum(part.nbytes for part in parts[rank])
            put.parts[0][rank, 2] = take.parts[0][rank, 2] = num_bytes
        gradients, back = self._send_rows(
            "gradients",
            lambda rank: peers[rank].gradients_of_slots(routes[rank], of_rows.given(taken[rank])),
        )
        return gradients, [home, put, take, back]

    def _through_modules(
        self,
        widths: Sequence[int],
        routes: Sequence[PeerBatch],
        by_slot: Sequence[list[list[Tensor]]],
    ) -> tuple[list[list[list[Tensor]]], list[Operation]]:
        """The same where modules read the slots' embeddings, and their outputs go home."""
        peers = self._peers
        of_rows = self._of_rows
        slots = list(map(of_rows.given, by_slot))
        read, put = self._timed(
            "put", lambda rank: of_rows.kept(torch.cat([each[0] for each in slots[rank]]))
        )
        for rank in self._ranks:
            put.parts[0][rank, 2] = read[rank].nbytes
        made = [
            of_rows.gradients([own.new_empty(len(own), widths[peer.group])], GRADIENT)[0]
            for own, peer in zip(read, peers, strict=True)
        ]
        outputs, home = self._send_rows(
            "embeddings", lambda rank: peers[rank].outputs_home(routes[rank], made[rank], widths)
        )
        _, back = self._send_rows(
            "gradients",
            lambda rank: peers[rank].gradients_of_outputs(
                routes[rank], of_rows.given(outputs[rank]), widths
            ),
        )
        gradients = [
            of_rows.kept(peer.of_slots(route, of_rows.gradients([own], GRADIENT)[0]))
            for peer, route, own in zip(peers, routes, read, strict=True)
        ]
        return gradients, [put, home, back]

    def _timed(self, name: str, work: Callable[[int], T]) -> tuple[list[T], Operation]:
        return timed(name, work, self._ranks, self._clock)

    def _outside(
        self, name: str, messages: Callable[[int], Messages[T]], ids: Sequence[int] | None = None
    ) -> tuple[list[T], Operation]:
        """Between all ranks."""
        runs = [joined([messages(rank)]) for rank in self._ranks]
        of_ranks = [0] * len(runs) if ids is None else ids
        results, done = lockstep(name, self._wires[0], runs, of_ranks, self._width, self._clock)
        return [result for (result,) in results], done

    def _send_rows(
        self, name: str, messages: Callable[[int], Messages[T]]
    ) -> tuple[list[T], Operation]:
        """Likewise, where a message says how much comes."""
        results, done = self._of_rows.run(
            name,
            self._wires[0],
            lambda rank: joined([messages(rank)]),
            [0] * len(self._ranks),
        )
        return [result for (result,) in results], done

    def _inside(
        self,
        name: str,
        run: Callable[[int], Joined[T]],
        ids: Sequence[int],
        sends_rows: bool = False,
    ) -> tuple[list[T], Operation]:
        """Between the members of each group of hosts."""
        groups = self._towers.places.groups
        results: dict[int, T] = {}
        operations = []
        for members in groups:
            wire = virtual_wire(0, len(members))
            of_members = [ids[rank] for rank in members]
            if sends_rows:
                of_place = partial(_of_member, run, members)
                of_group, done = self._of_rows.run(name, wire, of_place, of_members)
            else:
                runs = [run(rank) for rank in members]
                of_group, done = lockstep(name, wire, runs, of_members, self._width, self._clock)
            results |= dict(zip(members, of_group, strict=True))
            operations.append(done)
        return [results[rank] for rank in self._ranks], beside(operations, groups)


def _peer(job: Job, towers: ByTowers, wire: RowWire) -> PeerLookup:
    """A rank's part, with its lanes."""
    places = towers.places
    rank = wire.channel.ranks.rank
    number = places.group_of(rank)
    members = places.groups[number]
    here = towers.tables[number]
    tables = [table for each in here.groups for table in each.space.tables]
    inner = virtual_wire(members.index(rank), len(members))
    plan = within(job.plan, tables, members)
    lanes = groups_under(here.groups, plan, job.seed, inner, make_room=job.make_room)
    return PeerLookup(job.groups, places, towers.tables, lanes, wire)


def _of_member(run: Callable[[int], Joined[T]], members: Sequence[int], place: int) -> Joined[T]:
    return run(members[place])


def _num_ids(ids: PeerIds) -> int:
    """Of all ranks that one serves."""
    return sum(slot.values.numel() for slot in ids.slots)
