"""Some peers on this host, others elsewhere: two transports as one."""

from __future__ import annotations

from collections.abc import Sequence

from pibroch.collectives.bounded_lag.base import LaggedTransport, Opening, RankParts, Slot
from pibroch.collectives.bounded_lag.losses import WaitPolicy
from pibroch.collectives.bounded_lag.shared_memory import SharedMemoryTransport
from pibroch.collectives.bounded_lag.streams import StreamTransport
from pibroch.kernels.arrays import Bytes


class MixedTransport(LaggedTransport):
    """See :class:`LaggedTransport`.

    Args:
        opening: of them both.
        local: to the peers of this host.
        remote: to all others; its news wake who sleeps on the local one's futex word.
    """

    def __init__(
        self, opening: Opening, local: SharedMemoryTransport, remote: StreamTransport
    ) -> None:
        super().__init__(opening, (*local.peers, *remote.peers))
        self._local = local
        self._remote = remote
        # by peer, so that a question about one goes to the transport that has it
        self._of = {p: part for part in (local, remote) for p in part.peers}
        local.whole = remote.whole = self

    def put(self, slot: Slot, going: RankParts, only: int | None = None) -> None:
        """See :class:`LaggedTransport`."""
        if only is not None:
            self._of[only].put(slot, going, only)
            return
        self.put_beside(slot, going, 0)

    def put_beside(self, slot: Slot, going: RankParts, own: int) -> None:
        """See :class:`LaggedTransport`; the network gets its parts first."""
        # what takes longest first: the system sends while this rank copies
        self._remote.put(slot, going)
        self._local.put_beside(slot, going, own)

    def take(self, slot: Slot, coming: RankParts) -> None:
        """See :class:`LaggedTransport`."""
        # and last what came slowest
        self._local.take(slot, coming)
        self._remote.take(slot, coming)

    def has_arrived(self, slot: Slot, peer: int) -> bool:
        """See :class:`LaggedTransport`."""
        return self._of[peer].has_arrived(slot, peer)

    def view(self, slot: Slot, peer: int) -> Bytes:
        """See :class:`LaggedTransport`."""
        return self._of[peer].view(slot, peer)

    def sleep(self, seen: int) -> int:
        """See :class:`LaggedTransport`."""
        return self._local.sleep(seen)

    def announce(self, rank: int) -> None:
        """See :class:`LaggedTransport`."""
        for part in (self._local, self._remote):
            part.announce(rank)

    def look_at_others(self, missing: Sequence[int], number: int, policy: WaitPolicy) -> None:
        """See :class:`LaggedTransport`."""
        for part in (self._local, self._remote):
            part.look_at_others([p for p in missing if p in part.peers], number, policy)

    def close(self) -> None:
        """See :class:`LaggedTransport`."""
        self._local.close()
        self._remote.close()
