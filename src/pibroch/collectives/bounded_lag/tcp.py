"""Frames over sockets, between hosts.

A frame is sent at once as far as the system takes it, the rest by a thread.
"""

from __future__ import annotations

import atexit
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

import numpy as np

from pibroch.collectives.bounded_lag.base import Opening, Slot
from pibroch.collectives.bounded_lag.streams import END_S, NOTHING, StreamTransport
from pibroch.kernels.arrays import Bytes
from pibroch.wire.alive import HostWatch
from pibroch.wire.sockets import fill

_HEAD = struct.Struct("3q")  # stream, number, bytes of the part
_OPEN: WeakSet[TcpTransport] = WeakSet()


class TcpTransport(StreamTransport):
    """See :class:`StreamTransport`.

    Args:
        opening: as there.
        links: a connected socket to each peer; they belong to the transport from now on.
        hosts: tells which peers' hosts were lost; it belongs to the transport, too.
        on_news: as there.
    """

    def __init__(
        self,
        opening: Opening,
        links: dict[int, socket.socket],
        hosts: HostWatch,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(opening, links, on_news)
        self._links = links
        self._hosts = hosts
        self._outboxes = {p: _Outbox(link) for p, link in links.items()}
        self.listen()
        _OPEN.add(self)

    def send(self, peer: int, slot: Slot, part: Bytes = NOTHING) -> None:
        """See :class:`StreamTransport`."""
        self._outboxes[peer].send(_HEAD.pack(*slot, len(part)), part)

    def is_host_lost(self, peer: int) -> bool:
        """See :class:`StreamTransport`."""
        return self._hosts.is_lost(peer)

    def receive(self, peer: int) -> tuple[Slot, Bytes] | None:
        """See :class:`StreamTransport`."""
        head = np.empty(_HEAD.size, np.uint8)
        try:
            fill(self._links[peer], head.data)
            stream, number, nbytes = _HEAD.unpack(head.data)
            part = np.empty(nbytes, np.uint8)
            fill(self._links[peer], part.data)
        except OSError:
            return None
        return Slot(stream, number), part

    def end(self, timeout_s: float) -> None:
        """See :class:`StreamTransport`.

        The sockets close when the other ends have, or the time is over.
        """
        self.flush(timeout_s)
        deadline = time.monotonic() + timeout_s
        for link in self._links.values():
            with suppress(OSError):  # the other end was first
                link.shutdown(socket.SHUT_WR)
        for p, thread in zip(self.peers, self._threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            with suppress(OSError):
                self._links[p].shutdown(socket.SHUT_RDWR)
            self._links[p].close()
        self._hosts.close()

    def flush(self, timeout_s: float) -> None:
        """Let what is under way go out, in this time, and end the threads that send."""
        deadline = time.monotonic() + timeout_s
        for outbox in self._outboxes.values():
            outbox.close(max(0.0, deadline - time.monotonic()))


class _Outbox:
    """What goes to one peer, in order."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._changed = threading.Condition()
        self._left: deque[bytes] = deque()
        self._thread: threading.Thread | None = None
        self._is_broken = self._is_closed = False

    def send(self, head: bytes, part: Bytes) -> None:
        with self._changed:
            if self._is_broken or self._is_closed:
                return
            # at once where nothing waits: a thread's turn costs more than a short message
            sent = 0 if self._left else self._try(head, part)
            if sent < len(head):
                self._left.append(head[sent:])
            rest = max(0, sent - len(head))
            if rest < len(part):
                # a copy: the caller writes to this memory when send returns
                self._left.append(part[rest:].tobytes())
            if self._left:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="pibroch-lag-sender", daemon=True
                    )
                    self._thread.start()
                self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._left or self._is_broken, timeout_s)
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _try(self, head: bytes, part: Bytes) -> int:
        try:
            return self._link.sendmsg([head, part.data], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._is_broken = True
            return len(head) + len(part)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._left) or self._is_closed)
                if not self._left or self._is_broken:
                    return
                piece = self._left[0]
            try:
                self._link.sendall(piece)
            except OSError:
                self._is_broken = True
            with self._changed:
                self._left.popleft()
                self._changed.notify_all()


@atexit.register
def _finish() -> None:
    """Others still want what was put before a program ended."""
    for transport in list(_OPEN):
        transport.flush(END_S)
