"""The lookup by towers (SPTT; DMT, Sec. 3.1): peers in each group of hosts look up for a rank.

The paper's steps: (a) a rank's ids of each tower go to its peer there; (c) with that they are in
peer order, which is done with ids and not with embeddings, as they are smaller; (b, d) the members
of the group look all of them up among each other, so that rows or pooled vectors travel inside the
group alone; (e) the embeddings are joined sample by sample; (f) all peers exchange at once.
Backward goes the same way. The communication thread does all of it: ids travel while the batch
before computes, and (b) to (e), or to (f) where no module is between, follow as soon as the rows of
that batch are updated.

Shape legend: P samples of all ranks that this one serves, S_g columns of its group's embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.data.batch import one_hot_offsets
from pibroch.embedding import TableGroup
from pibroch.errors import ConfigError, RowIdError
from pibroch.exchange.agreement import bad_batch
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.base import Rates, Report
from pibroch.exchange.messages import together
from pibroch.exchange.prefetching import PrefetchingExchange
from pibroch.exchange.rows import is_one_hot, resolve
from pibroch.exchange.towers.places import TowerPlaces
from pibroch.exchange.towers.slots import AnySlots, slots_of
from pibroch.exchange.towers.tables import TablesHere, empty_for
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Bytes

ONE_HOT = 1
WEIGHTED = 2
BY_ID = 4
"""Marks of a batch in a head.

Each bag has one id, so that lengths do not travel; ids have weights; rows are wanted id by id.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PeerBatch:
    """The routes of a batch, for this rank's samples and for those that it serves.

    Attributes:
        batch: this rank's.
        sizes: samples of every rank.
        is_real: whether some rank's part is one of its own batches.
        slots: the parts of the ranks that this one serves, and empty ones where other members serve
            more.
        lanes: their routes inside the group, by lane.
    """

    batch: JaggedBatch
    sizes: tuple[int, ...]
    is_real: bool
    slots: Sequence[JaggedBatch]
    lanes: Sequence[AnySlots]

    @property
    def shares(self) -> list[float]:
        """The share of every rank in the global batch."""
        total = max(1, sum(self.sizes))
        return [size / total for size in self.sizes]


@dataclass(frozen=True, slots=True, eq=False)
class TowerRouted:
    """What a lookup leaves for its update."""

    peers: PeerBatch
    is_modular: bool


class TowersExchange(PrefetchingExchange[TowerRouted, PeerBatch, list[Tensor]]):
    """Tables lie with the hosts of their tower.

    Without modules all is as ``alltoall`` gives it, to the bit.

    Args:
        groups: all tables.
        places: groups of hosts.
        tables: of each of them.
        inside: the lanes of this rank's group, over its members.
        wire: between all ranks.

    Attributes:
        is_modular: whether lookups give the embeddings ``[P, S_g]`` of this rank's towers, for all
            that it serves, which modules here work on; see
            :func:`pibroch.exchange.towers.modules.place_towers`.
        last: the batch that was looked up last.
        members: this rank's group.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        places: TowerPlaces,
        tables: Sequence[TablesHere],
        inside: AllToAllExchange,
        wire: RowWire,
    ) -> None:
        super().__init__(
            wire.channel,
            tuple(dict.fromkeys(name for each in groups for name in each.space.features)),
        )
        self.groups = groups
        self.places = places
        self.tables = tables
        self.wire = wire
        self._inside = inside
        rank = self._ranks.rank
        self.peers = places.peers_of(rank)
        self.served = places.served_by(rank)
        self.group = places.group_of(rank)
        self._order = places.order_of(self.group)
        self._num_slots = places.most_served(self.group)
        self.here = tables[self.group]
        self._inner_wire = inside.wire
        self.members = inside.wire.channel.ranks
        self.shards = inside.shards
        largest = max(index.last_id for each in groups for index in each.space.indices.values())
        self._id_type: DTypeLike = np.int32 if largest < 1 << 31 else np.int64
        self._can_learn_weights = not any(lane.layout.owners_pool for lane in inside.lanes)
        self.is_modular = False
        self.last: PeerBatch | None = None
        self._bytes: Counter[str] = Counter()

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], TowerRouted]:
        """See :class:`Exchange`; where modules are placed, of all samples that are served."""
        peers, parts = self.fetched(batch, averaged_at)
        self.last = peers
        routed = TowerRouted(peers, self.is_modular)
        if self.is_modular:
            return [torch.cat(parts)] * len(self.groups), routed
        whole = empty_for(self.groups, batch)
        for tables, floats in zip(self.tables, parts, strict=True):
            tables.put(batch, floats, whole)
        return whole, routed

    def update(self, handle: TowerRouted, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; :meth:`to_peers` has weighted gradients that modules return."""
        peers = handle.peers
        if handle.is_modular:
            parts = gradients[0].split([slot.batch_size for slot in peers.slots])
            self._communication.submit(
                lambda: self._update(peers, [[p] * len(self.here.groups) for p in parts], rates)
            )
        else:
            sent = [tables.take(peers.batch, gradients) for tables in self.tables]

            def deliver() -> None:
                self._update(peers, self._gradients_of_slots(peers, sent), rates, peers.shares)

            self._communication.submit(deliver)
        self.forget()

    def report(self) -> Report:
        """See :class:`Exchange`; bytes between peers, by purpose, and inside the group."""
        return Report(bytes_by_purpose={**self._bytes, "inside towers": self._inner_wire.sent})

    def to_home(self, vectors: Tensor, peers: PeerBatch, widths: Sequence[int]) -> list[Tensor]:
        """Step (f): send the outputs of this rank's towers to the ranks whose samples they are.

        Blocks. All ranks call it.

        Args:
            vectors: outputs of the towers here, ``[P, widths[g]]``.
            peers: the batch.
            widths: of the outputs of each group of hosts.

        Returns:
            The outputs for this rank's samples, from each group of hosts, ``[B, widths[g']]``.
        """
        width = widths[self.group]
        size = peers.batch.batch_size
        floats = (
            vectors.detach().reshape(-1).split([peers.sizes[rank] * width for rank in self.served])
        )
        counts = [size * each for each in widths]
        parts = self._on_wire(
            lambda: self._carry("embeddings", self.served, floats, self.peers, counts)
        )
        return [
            part.view(size, -1) if size else part.view(0, each)
            for part, each in zip(parts, widths, strict=True)
        ]

    def to_peers(
        self, gradients: Sequence[Tensor], peers: PeerBatch, widths: Sequence[int]
    ) -> Tensor:
        """The inverse of :meth:`to_home` for gradients.

        They are weighted by each rank's share of the global batch: added, they are the gradients of
        the mean loss.
        """
        width = widths[self.group]
        counts = [peers.sizes[rank] * width for rank in self.served]
        floats = [gradient.detach().reshape(-1) for gradient in gradients]
        received = self._on_wire(
            lambda: self._carry("gradients", self.peers, floats, self.served, counts)
        )
        parts = zip(received, self.served, strict=True)
        shares = peers.shares
        return torch.cat(
            [part.view(peers.sizes[rank], width) * shares[rank] for part, rank in parts]
        )

    def _on_wire(self, task: Callable[[], list[Tensor]]) -> list[Tensor]:
        with self._ranks.waiting():
            return self._communication.submit(task).result()

    def _is_real_on_some_rank(self, routes: PeerBatch) -> bool:
        return routes.is_real

    def _route(self, batch: JaggedBatch, is_real: bool) -> PeerBatch:
        """Steps (a) and (c), and what the members of the group tell each other."""
        if batch.by_id and not self._can_learn_weights:
            raise ConfigError(
                "weights that are learned with a placement where owners pool",
                "a placement under which rows travel, e.g. table_wise",
            )
        kind = kind_of(batch)
        problem = self._problem(batch)
        messages = [
            packed(batch.pick(tables.features), kind, self._id_type) for tables in self.tables
        ]
        heads = torch.zeros(self._ranks.world_size, 4, dtype=torch.int64)
        heads[:, 0] = -1 if problem else batch.batch_size
        heads[:, 1] = is_real
        heads[:, 2] = kind
        for peer, message in zip(self.peers, messages, strict=True):
            heads[peer, 3] = len(message)
        received_heads = self.wire.channel.exchange_counts(heads)
        if (received_heads[:, 0] < 0).any():  # all ranks see it, and none has changed anything
            error = bad_batch(self.wire.channel, problem)
            assert error is not None, "some rank has it"
            raise error
        sizes = tuple(received_heads[:, 0].tolist())
        ids = self._ids_of_slots(messages, received_heads)
        slots = [
            unpacked(
                each, sizes[rank], int(received_heads[rank, 2]), self.here.features, self._id_type
            )
            for rank, each in zip(self.served, ids, strict=True)
        ]
        slots += [self._nothing(batch) for _ in range(self._num_slots - len(slots))]
        lanes = self._inside.lanes
        routes = together(self._inner_wire, [lane.route(slot) for lane in lanes for slot in slots])
        by_lane = [routes[n * len(slots) : (n + 1) * len(slots)] for n in range(len(lanes))]
        ways = [
            slots_of(lane, of_lane, self._order)
            for lane, of_lane in zip(lanes, by_lane, strict=True)
        ]
        return PeerBatch(batch, sizes, bool(received_heads[:, 1].any()), slots, ways)

    def _problem(self, batch: JaggedBatch) -> RowIdError | None:
        problems = (resolve(each, batch.pick(each.space.features))[1] for each in self.groups)
        return next((problem for problem in problems if problem is not None), None)

    def _ids_of_slots(self, messages: Sequence[Bytes], heads: Tensor) -> list[Bytes]:
        counts = [0] * self._ranks.world_size
        size = self._ranks.world_size
        parts = dict(zip(self.peers, messages, strict=True))
        for peer, message in parts.items():
            counts[peer] = len(message)
        sent = np.concatenate([parts[peer] for peer in sorted(parts)])
        received = self.wire.channel.all_to_all(
            torch.from_numpy(sent), counts, heads[:, 3].tolist()
        )
        self._bytes["ids"] += sum(counts) - counts[self._ranks.rank] + 32 * (size - 1)
        pieces = received.split(heads[:, 3].tolist())
        return [pieces[rank].numpy() for rank in self.served]

    def _nothing(self, batch: JaggedBatch) -> JaggedBatch:
        return unpacked(
            np.empty(0, np.uint8), 0, kind_of(batch) & ~WEIGHTED, self.here.features, self._id_type
        )

    def _fetch(self, routes: PeerBatch, averaged_at: int | None) -> list[Tensor]:
        """Steps (b) to (e), and (f) where no module is between."""
        fetches = [route.fetch(averaged_at) for way in routes.lanes for route in way.routes]
        fetched = together(self._inner_wire, fetches)
        num_slots = len(routes.slots)
        by_slot = []
        for number, slot in enumerate(routes.slots):
            room = self._inside.room_for(slot)
            parts = [
                way.routes[number].pool(fetched[n * num_slots + number], room)
                for n, way in enumerate(routes.lanes)
            ]
            by_slot.append(self._inside.assemble(slot, parts))
        if self.is_modular:
            return [each[0] for each in by_slot]
        served = zip(routes.slots[: len(self.served)], by_slot, strict=False)
        floats = [self.here.flat(slot, each) for slot, each in served]
        counts = [tables.num_floats(routes.batch) for tables in self.tables]
        return self._carry("embeddings", self.served, floats, self.peers, counts)

    def _gradients_of_slots(
        self, peers: PeerBatch, gradients: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        slots = peers.slots
        counts = [self.here.num_floats(slot) for slot in slots[: len(self.served)]]
        received = self._carry("gradients", self.peers, gradients, self.served, counts)
        padding = [torch.empty(0)] * (len(slots) - len(received))
        return [
            self.here.unflat(slot, part)
            for slot, part in zip(slots, [*received, *padding], strict=True)
        ]

    def _update(
        self,
        peers: PeerBatch,
        gradients: Sequence[list[Tensor]],
        rates: Rates,
        shares: Sequence[float] | None = None,
    ) -> None:
        """Send the gradients of each slot to the owners of rows, and update those owned here.

        Gradients that are not weighted yet are multiplied by ``shares``.
        """
        weights = [1.0] * len(peers.sizes) if shares is None else shares
        of_slot = [weights[rank] for rank in self.served] + [1.0] * (
            len(peers.slots) - len(self.served)
        )
        by_slot = [
            self._inside.split(slot, each)
            for slot, each in zip(peers.slots, gradients, strict=True)
        ]
        moving = [(n, way) for n, way in enumerate(peers.lanes) if not way.lane.is_frozen]
        sends = []
        for n, way in moving:
            for slot, share in enumerate(of_slot):
                sends.append(way.send(slot, way.combine(slot, by_slot[slot][n], share)))
        received = together(self._inner_wire, sends)
        num_slots = len(peers.slots)
        of_lane = [
            rates.learning_rates[number]
            for number, each in zip(self.here.number_of, self._inside.groups, strict=True)
            for _ in each.lanes
        ]
        together(
            self._inner_wire,
            [
                way.apply(
                    received[i * num_slots : (i + 1) * num_slots], weights, of_lane[n], rates.step
                )
                for i, (n, way) in enumerate(moving)
            ],
        )

    def _carry(
        self,
        purpose: str,
        to: Sequence[int],
        floats: Sequence[Tensor],
        by: Sequence[int],
        counts: Sequence[int],
    ) -> list[Tensor]:
        """Send float32 to some ranks, in the wire's type; returns what each of ``by`` sent."""
        before = self.wire.sent
        size = self._ranks.world_size
        send_counts = [0] * size
        receive_counts = [0] * size
        parts = dict(zip(to, floats, strict=True))
        for rank, part in parts.items():
            send_counts[rank] = len(part)
        for rank, count in zip(by, counts, strict=True):
            receive_counts[rank] = count
        received = self.wire.carry(
            torch.cat([parts[rank] for rank in sorted(parts)]), send_counts, receive_counts
        )
        self._bytes[purpose] += self.wire.sent - before
        ends = [0, *accumulate(receive_counts)]
        return [received[ends[rank] : ends[rank + 1]] for rank in by]


def kind_of(batch: JaggedBatch) -> int:
    """The marks that a batch has, added."""
    return (
        ONE_HOT * is_one_hot(batch) + WEIGHTED * (batch.weights is not None) + BY_ID * batch.by_id
    )


def packed(batch: JaggedBatch, kind: int, id_type: DTypeLike) -> Bytes:
    """Ids, then int32 lengths of bags unless all are one, then float32 weights if there are any."""
    parts = [batch.values.numpy().astype(id_type)]
    if not kind & ONE_HOT:
        parts.append(batch.lengths().numpy().astype(np.int32))
    if batch.weights is not None:
        parts.append(batch.weights.detach().contiguous().float().numpy())
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpacked(
    message: Bytes, num_samples: int, kind: int, features: tuple[str, ...], id_type: DTypeLike
) -> JaggedBatch:
    """The batch of :func:`packed`, without dense features and labels."""
    num_bags = len(features) * num_samples
    data = message.tobytes()  # copied: a message may lie unaligned
    id_bytes = np.dtype(id_type).itemsize
    weight_bytes = 4 * bool(kind & WEIGHTED)
    num_ids = num_bags
    if not kind & ONE_HOT:
        num_ids = (len(data) - 4 * num_bags) // (id_bytes + weight_bytes)
    values = np.frombuffer(data, id_type, num_ids).astype(np.int64)
    offsets = one_hot_offsets(num_bags)
    at = num_ids * id_bytes
    weights = None
    if not kind & ONE_HOT:
        lengths = np.frombuffer(data, np.int32, num_bags, at)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        at += 4 * num_bags
    if kind & WEIGHTED:
        weights = torch.from_numpy(np.frombuffer(data, np.float32, num_ids, at).copy())
    nothing = torch.empty(num_samples, 0)
    labels = torch.zeros(num_samples)
    return JaggedBatch(
        nothing,
        features,
        torch.from_numpy(values),
        offsets,
        labels,
        weights,
        by_id=bool(kind & BY_ID),
    )
