"""Bounded-lag messages by MPI's one-sided operations (BLS, Fig. 3).

Each rank puts into a window of the others' memory.

A rank's window is its inbox: a head with notes, and for each stream and sender a ring of slots,
whose header ends with the message's number. The part goes first, then a flush, then the number,
then another flush. What does not fit a slot stays in memory of the sender's, whose address is in
the header; the receiver gets it. Nobody is asked for anything but that get, which MPI may serve in
calls of the sender alone: a thread of it looks in now and then once there is such memory.

MPI frees windows together only: those that all have closed go when the next one is opened.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from pibroch.collectives.bounded_lag.base import LaggedTransport, Opening, RankParts, Slot
from pibroch.collectives.bounded_lag.losses import CLOSED, WaitPolicy
from pibroch.collectives.bounded_lag.mpi_start import forget_files
from pibroch.kernels.arrays import Bytes, Ints
from pibroch.wire.alive import has_hung_up, state_behind
from pibroch.wire.rendezvous import ConnectedPeers

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER_BYTES = 64
LINE_BYTES = 64
SEQUENCE = 0
NBYTES = 1
ADDRESS = 2
"""Words of a slot's header."""
SLEEP_S = 0.1
SPIN_S = 0.00005
LEAST_NAP_S = 0.00002
MOST_NAP_S = 0.002
# who has waited so long may be so late
LONG_S = 0.02
LONG_NAP_S = 0.005
PROGRESS_S = 0.002
END_S = 2.0
"""How long a rank that has closed lets others get what it has put."""


@dataclass(slots=True)
class _MpiWindows:
    """The state of one transport.

    ``kept`` is memory that others may still get, ``is_closed`` whether this rank is done with them.
    """

    inbox: MPI.Win
    overflow: MPI.Win
    kept: list[Bytes] = field(default_factory=list)
    is_closed: bool = False


class MpiTransport(LaggedTransport):
    """See the module. All members open theirs in the same order. Blocks.

    Args:
        opening: of the transport.
        mpi: the module, started between all ranks of the run.
        peers: a connected socket to each other rank, whose end says that a process has ended; they
            belong to the transport.
    """

    _communicators: ClassVar[dict[tuple[int, ...], MPI.Intracomm]] = {}
    _opened: ClassVar[dict[tuple[int, ...], list[_MpiWindows]]] = {}

    def __init__(self, opening: Opening, mpi: ModuleType, peers: ConnectedPeers) -> None:
        self._links: dict[int, socket.socket] = {**peers.local, **peers.remote[0]}
        super().__init__(opening, self._links)
        self.slot_bytes = opening.options.slot_bytes
        self._neighbours = frozenset(peers.local)
        self._mpi = mpi
        self._stride = HEADER_BYTES + -(-self.slot_bytes // LINE_BYTES) * LINE_BYTES
        self._head_bytes = -(-8 * self.world_size // LINE_BYTES) * LINE_BYTES
        rings = opening.num_streams * self.world_size * self.num_slots
        members = tuple(self.members)
        self._communicator = self._communicate(members)
        self._windows = self._open(members, self._head_bytes + rings * self._stride)
        self._inbox = self._windows.inbox
        self._overflow = self._windows.overflow
        memory = np.frombuffer(cast(memoryview, self._inbox.tomemory()), np.uint8)
        self._notes: Ints = memory[: 8 * self.world_size].view(np.int64)
        self._slots = memory[self._head_bytes :].reshape(
            opening.num_streams, self.world_size, self.num_slots, self._stride
        )
        self._headers = self._slots[..., :HEADER_BYTES].view(np.int64)
        self._own: dict[tuple[int, int, int], Bytes] = {}  # by stream, place and peer
        # with the number of the message
        self._got: dict[tuple[int, int, int], tuple[int, Bytes]] = {}
        self._progress: threading.Thread | None = None
        if peers.remote[0]:
            self._let_others_in()

    def put(self, slot: Slot, going: RankParts, only: int | None = None) -> None:
        """See :class:`LaggedTransport`."""
        place = slot.number % self.num_slots
        peers = self.peers if only is None else (only,)
        headers = np.zeros((len(peers), 3), np.int64)
        for header, p in zip(headers, peers, strict=True):
            nbytes = int(going.sizes[p])
            at = self._place(slot.stream, place)
            header[:] = slot.number + 1, nbytes, 0
            if nbytes > self.slot_bytes:
                header[ADDRESS] = self._keep(slot.stream, place, p, int(going.addresses[p]), nbytes)
            elif nbytes:
                self._send(int(going.addresses[p]), nbytes, p, at + HEADER_BYTES)
            # all but the number, which says that the rest is there and so goes after a flush
            self._send(header[NBYTES:].ctypes.data, 16, p, at + 8 * NBYTES)
        for p in peers:
            self._inbox.Flush(p)
        for header, p in zip(headers, peers, strict=True):
            self._send(header.ctypes.data, 8, p, self._place(slot.stream, place))
        for p in peers:
            self._inbox.Flush(p)

    def has_arrived(self, slot: Slot, peer: int) -> bool:
        """See :class:`LaggedTransport`."""
        return bool(
            self._headers[slot.stream, peer, slot.number % self.num_slots, SEQUENCE]
            == slot.number + 1
        )

    def view(self, slot: Slot, peer: int) -> Bytes:
        """See :class:`LaggedTransport`."""
        place = slot.number % self.num_slots
        # what was put by others becomes visible in this rank's memory
        self._inbox.Sync()
        sequence, nbytes, address = (
            int(word) for word in self._headers[slot.stream, peer, place, :3]
        )
        assert sequence == slot.number + 1, f"slot of message {slot.number} holds {sequence - 1}"
        if not address:
            return self._slots[slot.stream, peer, place, HEADER_BYTES : HEADER_BYTES + nbytes]
        number, buffer = self._got.get((slot.stream, place, peer), (-1, np.empty(0, np.uint8)))
        if number != slot.number:
            buffer = buffer if len(buffer) >= nbytes else np.empty(nbytes * 5 // 4, np.uint8)
            self._get(peer, address, buffer[:nbytes], slot.number)
            self._got[slot.stream, place, peer] = slot.number, buffer
        return buffer[:nbytes]

    def sleep(self, seen: int) -> int:
        """See :class:`LaggedTransport`; what comes makes the sum of all slots' numbers larger."""
        start = time.perf_counter()
        nap = LEAST_NAP_S
        while (news := int(self._headers[..., SEQUENCE].sum())) == seen:
            waited = time.perf_counter() - start
            if waited > SLEEP_S:
                break
            self._communicator.Iprobe()
            if waited > SPIN_S:
                time.sleep(nap)
                nap = min(2 * nap, MOST_NAP_S if waited < LONG_S else LONG_NAP_S)
        return news

    def announce(self, rank: int) -> None:
        """See :class:`LaggedTransport`."""
        self._note(rank + 1)

    def look_at_others(self, missing: Sequence[int], number: int, policy: WaitPolicy) -> None:
        """See :class:`LaggedTransport`."""
        states = {p: state_behind(self._links[p]) for p in missing}
        self.judge(states, {p: int(self._notes[p]) for p in self.peers}, number, policy)

    def close(self) -> None:
        """See :class:`LaggedTransport`."""
        if self._links:
            self._note(CLOSED)
        for link in self._links.values():
            link.close()
        self._links = {}
        self._windows.kept += self._own.values()
        self._windows.is_closed = True

    def _place(self, stream: int, place: int) -> int:
        """Of a slot of this rank's messages, in the window of the one that gets them."""
        return (
            self._head_bytes
            + ((stream * self.world_size + self.rank) * self.num_slots + place) * self._stride
        )

    def _send(self, address: int, nbytes: int, peer: int, place: int) -> None:
        memory = (ctypes.c_char * nbytes).from_address(address)
        byte = self._mpi.BYTE
        self._inbox.Put([memory, byte], peer, [place, nbytes, byte])

    def _keep(self, stream: int, place: int, peer: int, source: int, nbytes: int) -> int:
        """Copy a part to where the peer can get it; the address of that."""
        kept = self._own.get((stream, place, peer))
        if kept is None or len(kept) < nbytes:
            if kept is not None:
                self._windows.kept.append(kept)  # attached until all have closed
            kept = self._own[stream, place, peer] = np.empty(nbytes * 5 // 4, np.uint8)
            self._overflow.Attach(kept)
        self._let_others_in()
        ctypes.memmove(kept.ctypes.data, source, nbytes)
        address: int = self._mpi.Get_address(kept)
        return address

    def _get(self, peer: int, address: int, target: Bytes, number: int) -> None:
        byte = self._mpi.BYTE
        policy = WaitPolicy(self.members, self.timeout_s)
        request = self._overflow.Rget([target, byte], peer, [address, len(target), byte])
        looked = time.perf_counter()
        while not request.Test():
            time.sleep(LEAST_NAP_S)
            if time.perf_counter() - looked > SLEEP_S:
                looked = time.perf_counter()
                self.look_at_others([peer], number, policy)

    def _let_others_in(self) -> None:
        """Look into MPI now and then from now on, until all have closed.

        Others' gets may be served in its calls alone.
        """
        if self._progress is None:
            self._progress = threading.Thread(
                target=self._look_in, name="mpi progress", daemon=True
            )
            self._progress.start()

    def _look_in(self) -> None:
        closed_since: float | None = None
        while closed_since is None or time.monotonic() - closed_since < END_S:
            self._communicator.Iprobe()
            time.sleep(PROGRESS_S)
            if self._windows.is_closed:
                closed_since = closed_since or time.monotonic()
                if all(self._notes[p] == CLOSED for p in self.peers):
                    return

    def _note(self, text: int) -> None:
        word = np.array([text], np.int64)
        for p in self.peers:
            # memory of this host outlives its process
            if not has_hung_up(self._links[p]) or p in self._neighbours:
                self._send(word.ctypes.data, 8, p, 8 * self.rank)
                self._inbox.Flush(p)

    def _communicate(self, members: tuple[int, ...]) -> MPI.Intracomm:
        if members not in self._communicators:
            world = self._mpi.COMM_WORLD
            self._communicators[members] = world.Create_group(world.group.Incl(list(members)))
        return self._communicators[members]

    def _open(self, members: tuple[int, ...], nbytes: int) -> _MpiWindows:
        """New windows between all members, and an end to those that all have closed."""
        opened = self._opened.setdefault(members, [])
        mpi = self._mpi
        communicator = self._communicator
        closed = np.array([each.is_closed for each in opened], np.int64)
        if opened:
            communicator.Allreduce(closed.copy(), closed, mpi.MIN)
        for each in [each for each, is_closed in zip(opened, closed, strict=True) if is_closed]:
            for window in (each.inbox, each.overflow):
                window.Unlock_all()
                window.Free()
            opened.remove(each)
        inbox = mpi.Win.Allocate(nbytes, 1, mpi.INFO_NULL, communicator)
        memory = np.frombuffer(inbox.tomemory(), np.uint8)
        # it may have been a window before
        memory[: self._head_bytes] = 0
        memory[self._head_bytes :].reshape(-1, self._stride)[:, :HEADER_BYTES] = 0
        windows = _MpiWindows(inbox, mpi.Win.Create_dynamic(mpi.INFO_NULL, communicator))
        windows.inbox.Lock_all()
        windows.overflow.Lock_all()
        communicator.Barrier()
        forget_files()
        opened.append(windows)
        return windows
