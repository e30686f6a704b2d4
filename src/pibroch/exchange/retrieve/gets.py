"""Rows of other hosts: a lookup sends a request to each rank that has some.

A rank answers on threads of its own, one for each rank of other hosts, so it may compute meanwhile
and no rank waits for another one's step.

A request is int64 numbers (version of the tables, step of moving averages or -1, rows of each lane)
and the lanes' row numbers; an answer is two int64 (a state, bytes) and the lanes' rows in the type
of the wire, or a text where it is REFUSED; where it is NEWER the second number is the version of
the tables that is there, and nothing follows.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, count, pairwise

import numpy as np

from pibroch.collectives.bounded_lag.opening import store_between
from pibroch.collectives.ranks import Ranks
from pibroch.errors import PibrochError, RankFailedError, TrainingError
from pibroch.kernels.arrays import Bytes, RowIds
from pibroch.wire.alive import HostWatch, is_silence
from pibroch.wire.handshake_messages import IDLE
from pibroch.wire.rendezvous import rendezvous
from pibroch.wire.sockets import fill, give_up, send_all

OK = 0
REFUSED = 1
NEWER = 2
GET_TIMEOUT_S = 30.0
"""How long a rank may be silent in one wait before it counts as lost.

A thread of its own answers, whatever the rank computes.
"""
_LOOK_S = 0.5
"""How often who waits looks whether the other host was lost."""


Reads = Callable[[int, int | None, Sequence[Bytes]], list[Bytes] | int]
"""Gives, by version and averages' step, rows of each lane as they travel, for numbers that did.

Blocks until the version is there; returns the version in force where that is a later one. A thread
for each rank of other hosts calls it.
"""


class RemoteGets:
    """Sockets to the ranks of other hosts: two a pair, one for the requests of each side.

    All ranks make theirs together.

    Args:
        ranks: all.
        hosts: the number of each rank's host.

    Attributes:
        peers: ranks of other hosts.
    """

    def __init__(self, ranks: Ranks, hosts: Sequence[int]) -> None:
        self._ranks = ranks
        here = ranks.rank
        self.peers = tuple(p for p in range(ranks.world_size) if hosts[p] != hosts[here])
        self._asking: dict[int, socket.socket] = {}
        self._answering: dict[int, socket.socket] = {}
        self._hosts = HostWatch({})
        self._counting = threading.Lock()
        if len(set(hosts)) == 1:
            return
        met = rendezvous(
            store_between(ranks),
            here,
            ranks.world_size,
            ranks.timeout_s,
            shares_memory=False,
            streams=(0, 1, IDLE),
        ).remote
        for p in set(met[0]).difference(self.peers):
            for links in met.values():
                links.pop(p).close()
        self._hosts = HostWatch(met[IDLE])
        for stream in (0, 1):
            for p, link in met[stream].items():
                # the lower of two ranks asks on the first
                asks = (here < p) == (stream == 0)
                link.settimeout(_LOOK_S if asks else None)
                (self._asking if asks else self._answering)[p] = link

    def serve(self, read: Reads, num_lanes: int) -> None:
        """Answer the other hosts from now on, on a thread for each of their ranks."""
        for p, link in self._answering.items():
            name = f"pibroch-get-{p}"
            arguments = (p, link, read, num_lanes)
            threading.Thread(target=self._serve, args=arguments, name=name, daemon=True).start()

    def ask(self, p: int, version: int, averaged_at: int | None, rows: Sequence[RowIds]) -> None:
        """Send a request; :meth:`receive` waits for the answer."""
        numbers = [
            version,
            -1 if averaged_at is None else averaged_at,
            *(each.nbytes for each in rows),
        ]
        request = np.concatenate(
            [np.array(numbers, np.int64).view(np.uint8), *(each.view(np.uint8) for each in rows)]
        )
        try:
            send_all(self._asking[p], request.data, self._patience(p))
        except OSError as error:
            raise self._lost(p, error) from error
        self._count(p, len(request), 0)

    def receive(self, p: int, places: Sequence[Bytes]) -> int | None:
        """Wait for a rank's answer, and fill each lane's place.

        Returns the version of its tables instead, where that is a later one.

        Raises:
            RankFailedError: when it ended, or has not answered in time.
            TrainingError: when it refused.
        """
        read = partial(fill, self._asking[p], on_timeout=self._patience(p))
        head = np.empty(2, np.int64)
        try:
            read(head.view(np.uint8).data)
            state, nbytes = head.tolist()
            if state == NEWER:
                self._count(p, 0, head.nbytes)
                return int(nbytes)
            if state != OK:
                text = np.empty(nbytes, np.uint8)
                read(text.data)
                raise TrainingError(
                    f"no rows from rank {self._ranks.members[p]}: {text.tobytes().decode()}"
                )
            assert nbytes == sum(map(len, places)), "both know the lanes"
            for place in places:
                read(place.data)
        except OSError as error:
            raise self._lost(p, error) from error
        self._count(p, 0, head.nbytes + nbytes)
        return None

    def close(self) -> None:
        """End the streams, and the threads with them."""
        for link in (*self._asking.values(), *self._answering.values()):
            with suppress(OSError):  # the other end was first
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._hosts.close()

    def _patience(self, p: int) -> Callable[[], None]:
        """What to do each time that a peer has said nothing: see whether it is too late."""
        looks = count(1)

        def look() -> None:
            if self._hosts.is_lost(p):
                raise OSError(errno.EHOSTUNREACH, "no sign of the host")
            if next(looks) * _LOOK_S >= min(GET_TIMEOUT_S, self._ranks.timeout_s):
                give_up()

        return look

    def _serve(self, p: int, link: socket.socket, read: Reads, num_lanes: int) -> None:
        """Answer one peer until it ends; on a thread of its own."""
        head = np.empty(2 + num_lanes, np.int64)
        try:
            while True:
                fill(link, head.view(np.uint8).data)
                version, averaged_at, *sizes = head.tolist()
                body = np.empty(sum(sizes), np.uint8)
                fill(link, body.data)
                parts = [body[start:stop] for start, stop in pairwise(accumulate([0, *sizes]))]
                message = _message(read, version, None if averaged_at < 0 else averaged_at, parts)
                self._count(p, len(message), head.nbytes + len(body))
                link.sendall(message.data)
        except OSError:
            return  # the other end is gone: it sends no more requests

    def _count(self, p: int, sent: int, received: int) -> None:
        with self._counting:
            self._ranks.traffic.add(self._ranks.members[p], sent, self._ranks.members[p], received)

    def _lost(self, p: int, error: OSError) -> RankFailedError:
        # a late answer would be taken for that to the next request
        self._asking[p].close()
        if is_silence(error):
            why = "its host was lost"
        elif isinstance(error, TimeoutError):
            why = "it answers no gets"
        else:
            why = "its process ended, or let go of the tables"
        return RankFailedError(self._ranks.members[p], None, why)


def _message(read: Reads, version: int, averaged_at: int | None, rows: Sequence[Bytes]) -> Bytes:
    """The answer to a request, as it travels."""
    state = OK
    try:
        answer = read(version, averaged_at, rows)
    except PibrochError as error:
        state = REFUSED
        parts = [np.frombuffer(str(error).encode(), np.uint8)]
    else:
        if isinstance(answer, int):
            return np.array([NEWER, answer], np.int64).view(np.uint8)
        parts = answer
    return np.concatenate(
        [np.array([state, sum(map(len, parts))], np.int64).view(np.uint8), *parts]
    )
