"""Rows in memory that the ranks of a host share: each makes its own, and the others map it.

The memory has no name; file descriptors travel by Unix sockets. A rank shows the others two numbers
beside its rows. They only grow, and each is written by its rank alone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from pibroch.collectives.group_store import store_between
from pibroch.collectives.kernels import words
from pibroch.collectives.ranks import Ranks
from pibroch.embedding import MemoryShard
from pibroch.embedding.dtype import Dtype
from pibroch.errors import ConfigError, RankFailedError
from pibroch.kernels.arrays import Bytes, Ints, Records, Stored
from pibroch.kernels.memory import empty_rows
from pibroch.wire.alive import state_behind
from pibroch.wire.rendezvous import rendezvous
from pibroch.wire.segment_trade import receive_segment, send_segment
from pibroch.wire.segments import ForeignSegment, OwnSegment

NUMBERS_BYTES = 4096
VERSION = 0
"""Place of the number that says how often rows were written from outside."""
COPIED = 64
"""Place of the number that says of which version, plus one, the copies for the host are."""
LOOK_US = 100_000
"""The longest wait between two looks at the other process."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows in memory of this host; see :class:`pibroch.embedding.rows.ReadableRows`.

    Attributes:
        dim: weights in a row.
        records, stored: as in :class:`MemoryShard`.
        like: a shard of the same kind; ``None`` of copies, which have no optimizer state.
    """

    dim: int
    records: Records
    stored: Stored
    like: MemoryShard | None

    @classmethod
    def of(
        cls, records: Records, dim: int, dtype: Dtype, like: MemoryShard | None = None
    ) -> SharedRows:
        """Rows of any content in ``records``."""
        return cls(dim, records, records if dtype == "float32" else records.view(np.uint16), like)

    def column(self, field: str) -> int:
        """First column of a state field in a record."""
        assert self.like is not None, "copies are not read for averages"
        return self.like.column(field)

    def write(self, places: Ints, weights: Records) -> None:
        """Write weights to ``places``; the type of these rows holds them exactly."""
        bits = (
            weights
            if self.stored.dtype == np.float32
            else (weights.view(np.uint32) >> 16).astype(np.uint16)
        )
        self.stored[places, : self.dim] = bits


class HostMemory:
    """The memory that a rank shares with those of its host, who make theirs at the same time.

    Args:
        ranks: all, between which tables lie.
        hosts: the number of each rank's host.

    Attributes:
        hosts: of each rank.
        neighbours: the other ranks of this host.

    Raises:
        ConfigError: for ranks of one host that cannot share memory.
        TrainingError: when some do not answer in time.
    """

    def __init__(self, ranks: Ranks, hosts: Sequence[int]) -> None:
        self._ranks = ranks
        self.hosts = tuple(hosts)
        here = ranks.rank
        on_host = [p for p in range(ranks.world_size) if hosts[p] == hosts[here]]
        self.neighbours = tuple(p for p in on_host if p != here)
        self._links: dict[int, socket.socket] = {}
        self._segments: list[OwnSegment] = []
        self._numbers = np.zeros(NUMBERS_BYTES, np.uint8)
        self._foreign: dict[int, ForeignSegment] = {}
        if self.neighbours:
            own = OwnSegment.create(NUMBERS_BYTES)
            self._segments.append(own)
            self._numbers = own.array
            self._links = self._connect(on_host)

    def room(self, num_rows: int, width: int) -> Records:
        """Memory of zeros for rows ``[num_rows, width]``, which neighbours get by :meth:`trade`."""
        if not self.neighbours:
            return empty_rows(num_rows, width)
        nbytes = num_rows * width * 4
        segment = OwnSegment.create(max(nbytes, 1))
        self._segments.append(segment)
        return segment.array[:nbytes].view(np.float32).reshape(num_rows, width)

    def trade(self) -> dict[int, list[Bytes]]:
        """Exchange the memory made since the last call with the neighbours.

        Blocks until all neighbours call it, too. Returns of each neighbour what it made, in the
        order in which it did.
        """
        for link in self._links.values():
            for segment in self._segments:
                with suppress(OSError):  # a rank that has ended is noticed below
                    send_segment(link, segment)
        memory = {}
        for p, link in self._links.items():
            segments = [self._receive(p, link) for _ in self._segments]
            if p not in self._foreign:
                self._foreign[p] = segments.pop(0)  # the numbers
            memory[p] = [each.array for each in segments]
        for segment in self._segments:
            segment.close_fd()
        self._segments.clear()  # the maps are the rows'
        return memory

    def publish(self, place: int, value: int) -> None:
        """Show the neighbours a number, which is not below the one before."""
        words.write(self._numbers.ctypes.data + place, value)

    def published(self, place: int) -> int:
        """What this rank shows."""
        return int(words.read(self._numbers.ctypes.data + place))

    def published_by(self, p: int, place: int) -> int:
        """What a neighbour shows."""
        return int(words.read(self._foreign[p].address + place))

    def wait_for(self, p: int, place: int, least: int) -> None:
        """Wait until a neighbour shows at least this number.

        Raises:
            RankFailedError: when its process ended before, or within a collective's timeout.
        """
        address = self._foreign[p].address + place
        start = time.monotonic()
        while words.wait(address, least, LOOK_US) < least:
            # looked at first: a process that has ended has shown all that it will
            has_ended = state_behind(self._links[p]) == ""
            if words.read(address) >= least:
                return
            if has_ended or time.monotonic() - start > self._ranks.timeout_s:
                why = (
                    "its process ended, or let go of the tables"
                    if has_ended
                    else "it was waited for in vain"
                )
                raise RankFailedError(self._ranks.members[p], None, why)

    def _connect(self, members: Sequence[int]) -> dict[int, socket.socket]:
        """A Unix socket to each neighbour."""
        group = self._ranks.group(members)
        assert group is not None, "one of them"
        store = store_between(group, "memory")
        peers = rendezvous(store, group.rank, group.world_size, group.timeout_s, streams=(0,))
        if peers.remote[0]:
            peers.close()
            raise ConfigError(
                f"ranks {[members[p] for p in peers.remote[0]]} of the host of rank"
                f" {self._ranks.rank}, without its memory",
                "ranks of one machine (and network namespace) for one host",
                "leave `hosts` out, and they are found",
            )
        links = {members[p]: link for p, link in peers.local.items()}
        for link in links.values():
            link.settimeout(self._ranks.timeout_s)
        return dict(sorted(links.items()))

    def _receive(self, p: int, link: socket.socket) -> ForeignSegment:
        try:
            return receive_segment(link)
        except OSError as error:
            raise RankFailedError(
                self._ranks.members[p], None, f"no memory from it: {error}"
            ) from error
