"""When the lookup by towers does what: its messages on the communication thread.

Ids travel while the batch before computes; the group looks them up, and embeddings go home where no
module is between, as soon as the rows of that batch are updated. What travels says
:mod:`pibroch.exchange.towers.peer_lookup`.

Shape legend: P samples of all ranks that this one serves, S_g columns of its group's embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.exchange.base import Rates, Report
from pibroch.exchange.messages import Messages, carried, together
from pibroch.exchange.prefetching import PrefetchingExchange
from pibroch.exchange.towers.peer_lookup import PeerBatch, PeerLookup
from pibroch.exchange.towers.places import TowerPlaces
from pibroch.exchange.wire import RowWire

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TowerRouted:
    """What a lookup leaves for its update."""

    peers: PeerBatch
    is_modular: bool


class TowersExchange(PrefetchingExchange[TowerRouted, PeerBatch, list[Tensor]]):
    """Tables lie with the hosts of their tower.

    Without modules all is as ``alltoall`` gives it, to the bit.

    Args:
        peer: what this rank sends to its peers, and looks up for them.
        places: groups of hosts.
        inner_wire: between the members of this rank's group.

    Attributes:
        is_modular: whether lookups give the embeddings ``[P, S_g]`` of this rank's towers, for all
            that it serves, which modules here work on; see
            :func:`pibroch.exchange.towers.modules.place_towers`.
        last: the batch that was looked up last.
        members: this rank's group.
        group: its number.
        served: the ranks whose peer this one is.
    """

    def __init__(self, peer: PeerLookup, places: TowerPlaces, inner_wire: RowWire) -> None:
        features = (name for each in peer.groups for name in each.space.features)
        super().__init__(peer.wire.channel, tuple(dict.fromkeys(features)))
        self.groups = peer.groups
        self.places = places
        self.tables = peer.tables
        self.wire = peer.wire
        self.inner_wire = inner_wire
        self.members = inner_wire.channel.ranks
        self._peer = peer
        self.group = self._peer.group
        self.served = self._peer.served
        self.shards = [lane.shard for lane in self._peer.lanes]
        self.is_modular = False
        self.last: PeerBatch | None = None

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], TowerRouted]:
        """See :class:`Exchange`; where modules are placed, of all samples that are served."""
        peers, parts = self.fetched(batch, averaged_at)
        self.last = peers
        routed = TowerRouted(peers, self.is_modular)
        if self.is_modular:
            return [torch.cat(parts)] * len(self.groups), routed
        return self._peer.put(batch, parts), routed

    def update(self, handle: TowerRouted, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; :meth:`to_peers` has weighted gradients that modules return."""
        peers = handle.peers
        peer = self._peer
        if handle.is_modular:
            by_slot = peer.of_slots(peers, gradients[0])
            self._communication.submit(
                lambda: carried(self.inner_wire, peer.update(peers, by_slot, rates))
            )
        else:
            sent = peer.take(peers.batch, gradients)

            def deliver() -> None:
                by_slot = self._outside(peer.gradients_of_slots(peers, sent))
                carried(self.inner_wire, peer.update(peers, by_slot, rates, peers.shares))

            self._communication.submit(deliver)
        self.forget()

    def report(self) -> Report:
        """See :class:`Exchange`; bytes between peers, by purpose, and inside the group."""
        return Report(bytes_by_purpose={**self._peer.sent, "inside towers": self.inner_wire.sent})

    def to_home(self, vectors: Tensor, peers: PeerBatch, widths: Sequence[int]) -> list[Tensor]:
        """Send the outputs of this rank's towers to the ranks whose samples they are.

        Blocks. All ranks call it. See :meth:`PeerLookup.outputs_home`.
        """
        vectors = vectors.detach()
        return self._on_wire(lambda: self._peer.outputs_home(peers, vectors, widths))

    def to_peers(
        self, gradients: Sequence[Tensor], peers: PeerBatch, widths: Sequence[int]
    ) -> Tensor:
        """The inverse of :meth:`to_home` for gradients.

        They are weighted by each rank's share of the global batch: added, they are the gradients of
        the mean loss.
        """
        of_outputs = [gradient.detach() for gradient in gradients]
        return self._on_wire(lambda: self._peer.gradients_of_outputs(peers, of_outputs, widths))

    def _on_wire(self, messages: Callable[[], Messages[T]]) -> T:
        with self._ranks.waiting():
            return self._communication.submit(lambda: self._outside(messages())).result()

    def _outside(self, messages: Messages[T]) -> T:
        (result,) = together(self.wire, [messages])
        return result

    def _is_real_on_some_rank(self, routes: PeerBatch) -> bool:
        return routes.is_real

    def _route(self, batch: JaggedBatch, is_real: bool) -> PeerBatch:
        ids = self._outside(self._peer.announce(batch, is_real))
        return carried(self.inner_wire, self._peer.route(ids))

    def _fetch(self, routes: PeerBatch, averaged_at: int | None) -> list[Tensor]:
        by_slot = carried(self.inner_wire, self._peer.fetch(routes, averaged_at))
        if self.is_modular:
            return [each[0] for each in by_slot]
        return self._outside(self._peer.embeddings_home(routes, by_slot))
