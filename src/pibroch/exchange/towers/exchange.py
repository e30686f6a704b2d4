"""The lookup by towers in time: which thread sends what, and when.

Ids travel while the batch before computes; the group looks them up, and embeddings go home where no
module is between, as soon as the rows of that batch are updated. What travels says
:mod:`pibroch.exchange.towers.peer_lookup`.

Shape legend: P samples of all ranks that this one serves, S_g columns of its group's embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.exchange.base import Rates, Report
from pibroch.exchange.messages import Joined, Messages, alone, carried
from pibroch.exchange.prefetching import FedStep, PrefetchingExchange
from pibroch.exchange.schedule import Moment, Queue, Run, Runner, Schedule, Task
from pibroch.exchange.towers.peer_lookup import PeerBatch, PeerIds, PeerLookup
from pibroch.exchange.towers.places import TowerPlaces
from pibroch.exchange.wire import RowWire
from pibroch.observability.watch import watched

T = TypeVar("T")

INSIDE = "inner_wire"
"""The wire between the members of a group of hosts."""
_ROUTED = (
    Task("peer ids", Queue.NETWORK, Moment.READ),
    Task("tower route", Queue.NETWORK, Moment.READ, after=("peer ids",), wire=INSIDE),
    Task("tower fetch", Queue.NETWORK, Moment.TURN, after=("tower route",), wire=INSIDE),
)
SCHEDULE = Schedule(
    *_ROUTED,
    Task("embeddings", Queue.NETWORK, Moment.TURN, after=("tower fetch",)),
    Task("put", Queue.CALLER, Moment.LOOKUP, after=("embeddings",)),
    Task("take", Queue.CALLER, Moment.GRADIENTS),
    Task("gradients", Queue.NETWORK, Moment.GRADIENTS, after=("take",)),
    Task("tower update", Queue.NETWORK, Moment.GRADIENTS, after=("gradients",), wire=INSIDE),
)
WITH_MODULES = Schedule(
    *_ROUTED,
    Task("put", Queue.CALLER, Moment.LOOKUP, after=("tower fetch",)),
    Task("take", Queue.CALLER, Moment.GRADIENTS),
    Task("tower update", Queue.NETWORK, Moment.GRADIENTS, after=("take",), wire=INSIDE),
)
"""Where modules run between lookup and model, which send their outputs home themselves."""


class TowersExchange(PrefetchingExchange):
    """Tables lie with the hosts of their tower.

    Without modules all is as ``alltoall`` gives it, to the bit.

    Args:
        peer: what this rank sends to its peers, and looks up for them.
        places: groups of hosts.
        inner_wire: between the members of this rank's group.

    Attributes:
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
        self.peer = peer
        self.group = self.peer.group
        self.served = self.peer.served
        self.shards = [lane.shard for lane in self.peer.lanes]
        self._runner = Runner(SCHEDULE, {Queue.NETWORK: self._communication}, RUNS)
        self.last: PeerBatch | None = None

    def place_modules(self) -> None:
        """Lookups give what modules here read from now on.

        That is the embeddings ``[P, S_g]`` of this rank's towers, for all samples that it serves;
        see :func:`pibroch.exchange.towers.modules.place_towers`.
        """
        self.forget()
        threads = {Queue.NETWORK: self._communication}
        self._runner = Runner(WITH_MODULES, threads, RUNS_WITH_MODULES)

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], FedStep]:
        """See :class:`Exchange`; where modules are placed, of all samples that are served."""
        step = self._step_of(batch, averaged_at)
        self.last = _peers_of(step)
        self._runner.at(Moment.LOOKUP, self, step)
        return step.tasks.pop("put").result(), step

    def update(self, handle: FedStep, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; :meth:`to_peers` has weighted gradients that modules return."""
        handle.gradients = gradients
        handle.rates = rates
        self._runner.at(Moment.GRADIENTS, self, handle)
        self.forget()

    def report(self) -> Report:
        """See :class:`Exchange`; bytes between peers, by purpose, and inside the group."""
        return Report(bytes_by_purpose={**self.peer.sent, "inside towers": self.inner_wire.sent})

    def to_home(self, vectors: Tensor, peers: PeerBatch, widths: Sequence[int]) -> list[Tensor]:
        """Send the outputs of this rank's towers to the ranks whose samples they are.

        Blocks. All ranks call it. See :meth:`PeerLookup.outputs_home`.
        """
        vectors = vectors.detach()
        return self._on_wire("embeddings", partial(self.peer.outputs_home, peers, vectors, widths))

    def to_peers(
        self, gradients: Sequence[Tensor], peers: PeerBatch, widths: Sequence[int]
    ) -> Tensor:
        """The inverse of :meth:`to_home` for gradients.

        They are weighted by each rank's share of the global batch: added, they are the gradients of
        the mean loss.
        """
        of_outputs = [gradient.detach() for gradient in gradients]
        back = partial(self.peer.gradients_of_outputs, peers, of_outputs, widths)
        return self._on_wire("gradients", back)

    def _on_wire(self, name: str, messages: Callable[[], Messages[T]]) -> T:
        def send() -> T:
            return carried(self.wire, watched(name, self, None, lambda: alone(messages())))

        with self._ranks.waiting():
            return self._communication.submit(send).result()

    def _is_real_on_some_rank(self, step: FedStep) -> bool:
        return _peers_of(step).is_real


def _peers_of(step: FedStep) -> PeerBatch:
    peers: PeerBatch = step.tasks["tower route"].result()
    return peers


def _peer_ids(exchange: TowersExchange, step: FedStep) -> Joined[PeerIds]:
    step.batch.validate()  # may have been written to since it was made
    return alone(exchange.peer.announce(step.batch, step.is_real))


def _route(exchange: TowersExchange, _: FedStep, ids: PeerIds) -> Joined[PeerBatch]:
    return exchange.peer.route(ids)


def _fetch(exchange: TowersExchange, step: FedStep, peers: PeerBatch) -> Joined[list[list[Tensor]]]:
    return exchange.peer.fetch(peers, step.averaged_at)


def _embeddings(
    exchange: TowersExchange, step: FedStep, by_slot: list[list[Tensor]]
) -> Joined[list[Tensor]]:
    return alone(exchange.peer.embeddings_home(_peers_of(step), by_slot))


def _put(exchange: TowersExchange, step: FedStep) -> list[Tensor]:
    del step.tasks["tower fetch"]
    return exchange.peer.put(step.batch, step.tasks.pop("embeddings").result())


def _take(exchange: TowersExchange, step: FedStep) -> list[Tensor]:
    taken = exchange.peer.take(step.batch, step.gradients)
    step.gradients = ()
    return taken


def _gradients(
    exchange: TowersExchange, step: FedStep, taken: list[Tensor]
) -> Joined[list[list[Tensor]]]:
    return alone(exchange.peer.gradients_of_slots(_peers_of(step), taken))


def _update(exchange: TowersExchange, step: FedStep, by_slot: list[list[Tensor]]) -> Joined[None]:
    peers = _peers_of(step)
    assert step.rates is not None, "an update has them"
    return exchange.peer.update(peers, by_slot, step.rates, peers.shares)


def _put_for_modules(exchange: TowersExchange, step: FedStep) -> list[Tensor]:
    by_slot: list[list[Tensor]] = step.tasks.pop("tower fetch").result()
    return [torch.cat([each[0] for each in by_slot])] * len(exchange.groups)


def _take_of_modules(exchange: TowersExchange, step: FedStep) -> list[list[Tensor]]:
    by_slot = exchange.peer.of_slots(_peers_of(step), step.gradients[0])
    step.gradients = ()
    return by_slot


def _update_weighted(
    exchange: TowersExchange, step: FedStep, by_slot: list[list[Tensor]]
) -> Joined[None]:
    assert step.rates is not None, "an update has them"
    return exchange.peer.update(_peers_of(step), by_slot, step.rates)


_ROUTES: dict[str, Run] = {
    "peer ids": _peer_ids,
    "tower route": _route,
    "tower fetch": _fetch,
}
RUNS = _ROUTES | {
    "embeddings": _embeddings,
    "put": _put,
    "take": _take,
    "gradients": _gradients,
    "tower update": _update,
}
RUNS_WITH_MODULES = _ROUTES | {
    "put": _put_for_modules,
    "take": _take_of_modules,
    "tower update": _update_weighted,
}
