"""What a rank sends to its peers and inside its group of hosts: the lookup by towers without time.

The paper's steps (SPTT; DMT, Sec. 3.1): (a) a rank's ids of each tower go to its peer there; (c)
with that they are in peer order, which is done with ids and not with embeddings, as they are
smaller; (b, d) the members of the group look all of them up among each other, so that rows or
pooled vectors travel inside the group alone; (e) the embeddings are joined sample by sample; (f)
all peers exchange at once. Backward goes the same way.

Each step is a generator of messages, between all ranks or inside the group.

Shape legend: P samples of all ranks that this one serves, S_g columns of its group's embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from pibroch.exchange.alltoall.group_lanes import GroupLanes, assemble, split
from pibroch.exchange.base import Rates
from pibroch.exchange.messages import Counts, Joined, Messages, Rows, Values, joined
from pibroch.exchange.rows import is_one_hot, resolve, room_for
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
class PeerIds:
    """A batch whose ids are with this rank's peers.

    Attributes:
        batch: this rank's.
        sizes: samples of every rank.
        is_real: whether some rank's part is one of its own batches.
        slots: the parts of the ranks that this one serves, and empty ones where other members serve
            more.
    """

    batch: JaggedBatch
    sizes: tuple[int, ...]
    is_real: bool
    slots: Sequence[JaggedBatch]

    @property
    def shares(self) -> list[float]:
        """The share of every rank in the global batch."""
        total = max(1, sum(self.sizes))
        return [size / total for size in self.sizes]


@dataclass(frozen=True, slots=True, eq=False)
class PeerBatch(PeerIds):
    """The routes of a batch, for this rank's samples and for those that it serves.

    Attributes:
        lanes: the slots' routes inside the group, by lane.
    """

    lanes: Sequence[AnySlots]


class PeerLookup:
    """One rank's part in lookups by towers.

    Args:
        groups: all tables.
        places: groups of hosts.
        tables: of each of them.
        inside: the lanes of this rank's group, over its members.
        wire: between all ranks.

    Attributes:
        peers, served: see :class:`TowerPlaces`.
        group: the number of this rank's group of hosts.
        here: its tables.
        sent: bytes to peers so far, by purpose.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        places: TowerPlaces,
        tables: Sequence[TablesHere],
        inside: Sequence[GroupLanes],
        wire: RowWire,
    ) -> None:
        self.groups = groups
        self.tables = tables
        self.wire = wire
        self.inside = inside
        self.lanes = [lane for each in inside for lane in each.lanes]
        ranks = wire.channel.ranks
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self.peers = places.peers_of(self._rank)
        self.served = places.served_by(self._rank)
        self.group = places.group_of(self._rank)
        self.here = tables[self.group]
        self.sent: Counter[str] = Counter()
        self._order = places.order_of(self.group)
        self._num_slots = places.most_served(self.group)
        largest = max(index.last_id for each in groups for index in each.space.indices.values())
        self._id_type: DTypeLike = np.int32 if largest < 1 << 31 else np.int64
        self._can_learn_weights = not any(lane.layout.owners_pool for lane in self.lanes)

    def announce(self, batch: JaggedBatch, is_real: bool) -> Messages[PeerIds]:
        """Steps (a) and (c), between all ranks.

        Raises:
            ConfigError: for weights that are learned where owners pool.
            RowIdError: for an id outside its table; DataError on the other ranks.
        """
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
        heads = torch.zeros(self._world_size, 4, dtype=torch.int64)
        heads[:, 0] = -1 if problem else batch.batch_size
        heads[:, 1] = is_real
        heads[:, 2] = kind
        for peer, message in zip(self.peers, messages, strict=True):
            heads[peer, 3] = len(message)
        received_heads = (yield Counts(heads)).tensor
        if (received_heads[:, 0] < 0).any():  # all ranks see it, and none has changed anything
            error = bad_batch(self.wire.channel, problem)
            assert error is not None, "some rank has it"
            raise error
        sizes = tuple(received_heads[:, 0].tolist())
        ids = yield from self._ids_of_slots(messages, received_heads)
        slots = [
            unpacked(
                each, sizes[rank], int(received_heads[rank, 2]), self.here.features, self._id_type
            )
            for rank, each in zip(self.served, ids, strict=True)
        ]
        slots += [self._nothing(batch) for _ in range(self._num_slots - len(slots))]
        return PeerIds(batch, sizes, bool(received_heads[:, 1].any()), slots)

    def _problem(self, batch: JaggedBatch) -> RowIdError | None:
        problems = (resolve(each, batch.pick(each.space.features))[1] for each in self.groups)
        return next((problem for problem in problems if problem is not None), None)

    def _ids_of_slots(self, messages: Sequence[Bytes], heads: Tensor) -> Messages[list[Bytes]]:
        counts = [0] * self._world_size
        parts = dict(zip(self.peers, messages, strict=True))
        for peer, message in parts.items():
            counts[peer] = len(message)
        sizes = heads[:, 3].tolist()
        sent = np.concatenate([parts[peer] for peer in sorted(parts)])
        answer = yield Values(torch.from_numpy(sent), counts, sizes)
        self.sent["ids"] += sum(counts) - counts[self._rank] + 32 * (self._world_size - 1)
        pieces = answer.tensor.split(sizes)
        return [pieces[rank].numpy() for rank in self.served]

    def _nothing(self, batch: JaggedBatch) -> JaggedBatch:
        return unpacked(
            np.empty(0, np.uint8), 0, kind_of(batch) & ~WEIGHTED, self.here.features, self._id_type
        )

    def route(self, ids: PeerIds) -> Joined[PeerBatch]:
        """What the members of the group tell each other of their slots."""
        slots = ids.slots
        routes = yield from joined([lane.route(slot) for lane in self.lanes for slot in slots])
        by_lane = [routes[n * len(slots) : (n + 1) * len(slots)] for n in range(len(self.lanes))]
        ways = [
            slots_of(lane, of_lane, self._order)
            for lane, of_lane in zip(self.lanes, by_lane, strict=True)
        ]
        return PeerBatch(ids.batch, ids.sizes, ids.is_real, slots, ways)

    def fetch(self, batch: PeerBatch, averaged_at: int | None) -> Joined[list[list[Tensor]]]:
        """Steps (b) to (e), inside the group: the embeddings of each slot, by group of tables."""
        fetched = yield from joined(
            [route.fetch(averaged_at) for way in batch.lanes for route in way.routes]
        )
        num_slots = len(batch.slots)
        by_slot = []
        for number, slot in enumerate(batch.slots):
            room = room_for([each.tables for each in self.inside], slot)
            parts = [
                way.routes[number].pool(fetched[n * num_slots + number], room)
                for n, way in enumerate(batch.lanes)
            ]
            by_slot.append(assemble(self.inside, slot, parts))
        return by_slot

    def embeddings_home(
        self, batch: PeerBatch, by_slot: Sequence[Sequence[Tensor]]
    ) -> Messages[list[Tensor]]:
        """Step (f) without modules; returns the floats that each group has for this rank."""
        served = zip(batch.slots[: len(self.served)], by_slot, strict=False)
        floats = [self.here.flat(slot, each) for slot, each in served]
        counts = [tables.num_floats(batch.batch) for tables in self.tables]
        return (yield from self._carry("embeddings", self.served, floats, self.peers, counts))

    def put(self, batch: JaggedBatch, parts: Sequence[Tensor]) -> list[Tensor]:
        """The embeddings of all tables, from what :meth:`embeddings_home` returned."""
        whole = empty_for(self.groups, batch)
        for tables, floats in zip(self.tables, parts, strict=True):
            tables.put(batch, floats, whole)
        return whole

    def take(self, batch: JaggedBatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`put`, for gradients."""
        return [tables.take(batch, gradients) for tables in self.tables]

    def gradients_of_slots(
        self, batch: PeerBatch, gradients: Sequence[Tensor]
    ) -> Messages[list[list[Tensor]]]:
        """The inverse of :meth:`embeddings_home`, for what :meth:`take` gave."""
        slots = batch.slots
        counts = [self.here.num_floats(slot) for slot in slots[: len(self.served)]]
        received = yield from self._carry("gradients", self.peers, gradients, self.served, counts)
        padding = [torch.empty(0)] * (len(slots) - len(received))
        return [
            self.here.unflat(slot, part)
            for slot, part in zip(slots, [*received, *padding], strict=True)
        ]

    def outputs_home(
        self, batch: PeerBatch, vectors: Tensor, widths: Sequence[int]
    ) -> Messages[list[Tensor]]:
        """Step (f): outputs of the towers here go to the ranks whose samples they are.

        Args:
            batch: of which they are.
            vectors: ``[P, widths[g]]``.
            widths: of the outputs of each group of hosts.

        Returns:
            The outputs for this rank's samples, from each group of hosts, ``[B, widths[g']]``.
        """
        width = widths[self.group]
        size = batch.batch.batch_size
        floats = vectors.reshape(-1).split([batch.sizes[rank] * width for rank in self.served])
        counts = [size * each for each in widths]
        parts = yield from self._carry("embeddings", self.served, floats, self.peers, counts)
        return [
            part.view(size, -1) if size else part.view(0, each)
            for part, each in zip(parts, widths, strict=True)
        ]

    def gradients_of_outputs(
        self, batch: PeerBatch, gradients: Sequence[Tensor], widths: Sequence[int]
    ) -> Messages[Tensor]:
        """The inverse of :meth:`outputs_home`, for gradients, weighted by each rank's share."""
        width = widths[self.group]
        counts = [batch.sizes[rank] * width for rank in self.served]
        floats = [gradient.reshape(-1) for gradient in gradients]
        received = yield from self._carry("gradients", self.peers, floats, self.served, counts)
        parts = zip(received, self.served, strict=True)
        shares = batch.shares
        return torch.cat(
            [part.view(batch.sizes[rank], width) * shares[rank] for part, rank in parts]
        )

    def of_slots(self, batch: PeerBatch, gradient: Tensor) -> list[list[Tensor]]:
        """The gradients ``[P, S_g]`` of what modules read as those of each slot."""
        parts = gradient.split([slot.batch_size for slot in batch.slots])
        return [[part] * len(self.here.groups) for part in parts]

    def update(
        self,
        batch: PeerBatch,
        gradients: Sequence[Sequence[Tensor]],
        rates: Rates,
        shares: Sequence[float] | None = None,
    ) -> Joined[None]:
        """Send the gradients of each slot to the owners of rows, and update those owned here.

        Gradients that are not weighted yet are multiplied by ``shares``.
        """
        weights = [1.0] * len(batch.sizes) if shares is None else shares
        of_slot = [weights[rank] for rank in self.served] + [1.0] * (
            len(batch.slots) - len(self.served)
        )
        by_slot = [
            split(self.inside, slot, each)
            for slot, each in zip(batch.slots, gradients, strict=True)
        ]
        moving = [(n, way) for n, way in enumerate(batch.lanes) if not way.lane.is_frozen]
        sends = []
        for n, way in moving:
            for slot, share in enumerate(of_slot):
                sends.append(way.send(slot, way.combine(slot, by_slot[slot][n], share)))
        received = yield from joined(sends)
        num_slots = len(batch.slots)
        of_lane = [
            rates.learning_rates[number]
            for number, each in zip(self.here.number_of, self.inside, strict=True)
            for _ in each.lanes
        ]
        yield from joined(
            [
                way.apply(
                    received[i * num_slots : (i + 1) * num_slots], weights, of_lane[n], rates.step
                )
                for i, (n, way) in enumerate(moving)
            ]
        )

    def _carry(
        self,
        purpose: str,
        to: Sequence[int],
        floats: Sequence[Tensor],
        by: Sequence[int],
        counts: Sequence[int],
    ) -> Messages[list[Tensor]]:
        """Send float32 to some ranks, in the wire's type; returns what each of ``by`` sent."""
        send_counts = [0] * self._world_size
        receive_counts = [0] * self._world_size
        parts = dict(zip(to, floats, strict=True))
        for rank, part in parts.items():
            send_counts[rank] = len(part)
        for rank, count in zip(by, counts, strict=True):
            receive_counts[rank] = count
        values = torch.cat([parts[rank] for rank in sorted(parts)])
        answer = yield Rows(values, send_counts, receive_counts)
        self.sent[purpose] += answer.sent
        ends = [0, *accumulate(receive_counts)]
        return [answer.tensor[ends[rank] : ends[rank + 1]] for rank in by]


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
