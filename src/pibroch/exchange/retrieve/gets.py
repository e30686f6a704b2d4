"""Rows of other hosts: a lookup sends a request to each rank that has some.

A rank answers on threads of its own, one for each rank of other hosts, so it may compute meanwhile
and no rank waits for another one's step.

Requests are those of :mod:`pibroch.rpc.rows`: the lanes' row numbers. An answer has the lanes' rows
in the type of the wire, or in their place the version of the tables that is there, in decimal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import msgspec

from pibroch.collectives import Channel
from pibroch.errors import (
    PibrochError,
    RankFailedError,
    RpcTimeoutError,
    TrainingError,
    WorkerLostError,
)
from pibroch.kernels.arrays import Bytes, RowIds
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.rows import InPlaceOfRows, RowWorker
from pibroch.rpc.transport.frames import HEADER
from pibroch.wire.ranks import agreed_key, key_of_run, published_key
from pibroch.wire.sockets import own_address

GET_TIMEOUT_S = 30.0
"""How long a rank may take for an answer before it counts as lost, beside the answer's way.

A thread of its own answers, whatever the rank computes.
"""
SLOWEST_BYTES_PER_S = 1e6
"""Of a link on which rows are still waited for."""

Reads = Callable[[int, int | None, Sequence[Bytes]], list[Bytes] | int]
"""Gives, by version and averages' step, rows of each lane as they travel, for numbers that did.

Blocks until the version is there; returns the version in force where that is a later one. A thread
for each rank of other hosts calls it.
"""


class LaneRows(msgspec.Struct, frozen=True, array_like=True, tag="lanes"):
    """The metadata of a request.

    Attributes:
        version: of the tables.
        averaged_at: step of moving averages.
        sizes: bytes of each lane's row numbers.
    """

    version: int
    averaged_at: int | None
    sizes: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LaneRows).decode


class RemoteGets:
    """Requests to the ranks of other hosts, and their requests, which are answered from now on.

    All ranks make theirs together.

    Args:
        channel: between all.
        hosts: the number of each rank's host.
        read: what answers.

    Attributes:
        peers: ranks of other hosts.
    """

    def __init__(self, channel: Channel, hosts: Sequence[int], read: Reads) -> None:
        self._ranks = channel.ranks
        self._read = read
        here = self._ranks.rank
        self.peers = tuple(p for p in range(len(hosts)) if hosts[p] != hosts[here])
        self._infos = [WorkerInfo(f"rows:rank-{p}", p) for p in range(len(hosts))]
        self._counting = threading.Lock()
        self._worker: RowWorker | None = None
        if len(set(hosts)) == 1:
            return
        key = key_of_run()
        host = own_address()
        worker = RowWorker(
            self._infos[here],
            agreed_key(key, channel.gather(published_key(key))[0]),
            {},
            self._give,
            (host, 0),
            num_threads=len(self.peers),
            may_wait=True,
            limits=Limits(),
        )
        addresses = channel.gather([host, worker.port])
        worker.know({self._infos[p]: (addresses[p][0], addresses[p][1]) for p in self.peers})
        worker.start()
        self._worker = worker

    def ask(
        self,
        p: int,
        version: int,
        averaged_at: int | None,
        rows: Sequence[RowIds],
        places: Sequence[Bytes],
    ) -> Callable[[], int | None]:
        """Send a request, whose answer fills each lane's place.

        Returns what waits for it, and returns the version of that rank's tables where it is a later
        one. It raises RankFailedError when the rank ended, or has not answered in time, and
        TrainingError when it refused.
        """
        assert self._worker is not None, "there are other hosts"
        wanted = _encode(LaneRows(version, averaged_at, [each.nbytes for each in rows]))
        within_s = min(GET_TIMEOUT_S, self._ranks.timeout_s)
        within_s += sum(map(len, places)) / SLOWEST_BYTES_PER_S
        explained = partial(self._explained, p)
        reading = self._worker.read(
            self._infos[p], wanted, rows, within_s, explained, into=places, asks_again=False
        )
        self._count(p, HEADER.size + len(wanted) + sum(each.nbytes for each in rows), 0)

        def answer() -> int | None:
            try:
                reading.wait()
            except InPlaceOfRows as other:
                self._count(p, 0, HEADER.size + len(other.word))
                return int(other.word)
            self._count(p, 0, HEADER.size + sum(map(len, places)))
            return None

        return answer

    def close(self) -> None:
        """Answer no more."""
        if self._worker is not None:
            self._worker.close()

    def _give(self, peer: WorkerInfo, wanted: bytes, numbers: Bytes) -> list[Bytes] | bytes:
        """See :data:`pibroch.rpc.rows.Give`; on a thread of the worker's."""
        lanes = _decode(wanted)
        parts = [numbers[start:stop] for start, stop in pairwise(accumulate([0, *lanes.sizes]))]
        rows = self._read(lanes.version, lanes.averaged_at, parts)
        given = str(rows).encode() if isinstance(rows, int) else rows
        received = HEADER.size + len(wanted) + len(numbers)
        sent = len(given) if isinstance(given, bytes) else sum(map(len, given))
        self._count(peer.id, HEADER.size + sent, received)
        return given

    def _count(self, p: int, sent: int, received: int) -> None:
        with self._counting:
            self._ranks.traffic.add(self._ranks.members[p], sent, self._ranks.members[p], received)

    def _explained(self, p: int, error: BaseException) -> BaseException:
        rank = self._ranks.members[p]
        explained: PibrochError
        if isinstance(error, WorkerLostError):
            explained = RankFailedError(rank, None, error.reason)
        elif isinstance(error, RpcTimeoutError):
            explained = RankFailedError(rank, None, "it answers no gets")
        elif isinstance(error, PibrochError):
            explained = TrainingError(f"no rows from rank {rank}: {error}")
        else:
            return error
        explained.__cause__ = error
        return explained
