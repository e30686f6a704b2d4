"""A non-blocking socket that sends and receives frames.

Threads: any thread sends, under ``_lock``: at once as much as the kernel takes, the rest is queued
and written by the loop. One thread at a time reads, the one that holds ``_reading``: the loop, or a
caller that waits for its own answer (``read_until``), which saves two thread switches; the loop
leaves the socket alone meanwhile. ``_reading`` is also held until ``start``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from pibroch.errors import ProtocolError, RpcError
from pibroch.rpc.transport.frames import Frame, FrameReader, seal
from pibroch.wire.alive import is_silence
from pibroch.wire.descriptors import MAX_DESCRIPTORS, receive_descriptors
from pibroch.wire.reactor import READ, SPIN_S, WRITE, Reactor
from pibroch.wire.segments import OwnSegment

log = logging.getLogger(__name__)

Buffer = bytes | memoryview


_MAX_BUFFERS = 64
_READS_AT_A_TIME = 16  # then the loop turns to the other sockets
_LONGEST_SLEEP_S = 3600.0
_READER_LEAVES_S = 0.05  # how long a broken stream waits for the caller that reads it
_LAST_ROUNDS = 16  # of reads once nothing can be written: more than the kernel holds
STALL_S = 30.0  # longer than a process is stopped for while somebody looks at it
STALL_BYTES = 10 << 10  # even a slow link delivers so much in that time


class FrameStream:
    """One connected, admitted socket.

    Args:
        reactor: the loop that watches it from now on.
        sock: in non-blocking mode; the stream closes it.
        reader: cuts what arrives into frames.
        on_frame: called with each frame by the thread that reads. An ``RpcError`` from it closes
            the stream.
        on_closed: called once, on the loop, with the reason.
        on_drained: called on the loop, with this stream, when the kernel has taken all that was
            queued.
        checksums: add checksums to the frames that are sent.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        reader: FrameReader,
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[str], None],
        on_drained: Callable[[FrameStream], None] = lambda stream: None,
        checksums: bool = False,
    ) -> None:
        self._reactor = reactor
        self._sock = sock
        self._reader = reader
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_drained = on_drained
        self._checksums = checksums
        self._is_stall_watched = False
        self._descriptors: deque[int] = deque()
        self._lock = threading.Lock()
        self._queue: deque[tuple[memoryview, Sequence[OwnSegment]]] = deque()
        self.num_queued_bytes = 0  # that the kernel has not taken yet
        self._is_closed = False
        self._fd = sock.fileno()
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        is_plain = self._tls is None and sock.family != socket.AF_UNIX
        self._receive = sock.recv_into if is_plain else self._receive_specially
        self._poller = select.poll()  # whoever reads finds out with it whether there is more
        self._poller.register(self._fd, select.POLLIN)
        self._reading = threading.Lock()
        self._reading.acquire()
        self._is_read_by_caller = False
        self._broken_by = ""
        self._answers_soon = False
        self._spin_s = reactor.spin_s

    def start(self, surplus: bytes) -> None:
        """Begin to read (on the loop); ``surplus`` are bytes that followed the handshake."""
        reason = ""
        try:
            self._feed(memoryview(surplus))
        except RpcError as error:
            reason = str(error)
        finally:
            self._reading.release()
        if reason:
            self.close(reason)
            return
        with self._lock:
            self._reactor.watch(self._fd, self._events(), self._on_events)
        if self._tls is not None:
            # bytes that TLS has decrypted already do not make the socket readable
            self._on_events(READ)

    def _feed(self, view: memoryview) -> None:
        while view:
            target = self._reader.buffer()
            num_bytes = min(len(target), len(view))
            target[:num_bytes] = view[:num_bytes]
            view = view[num_bytes:]
            for frame in self._reader.received(num_bytes):
                self._on_frame(frame)

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[OwnSegment] = ()) -> None:
        """Send ``buffers`` one after the other, from any thread; does not block.

        ``descriptors`` go with the first byte and are closed then. The buffers must not change
        until they are sent. A closed stream drops them.
        """
        if self._checksums:
            buffers = seal(buffers)
        if len(buffers) == 1 and not descriptors and self._send_at_once(buffers[0]):
            return
        views = [
            memoryview(buffer).cast("B") if isinstance(buffer, memoryview) else memoryview(buffer)
            for buffer in buffers
        ]
        with self._lock:
            if self._is_closed:
                return
            was_idle = not self._queue
            for view in views:
                if view.nbytes:
                    self.num_queued_bytes += view.nbytes
                    self._queue.append((view, descriptors))
                    descriptors = ()
            if not was_idle:
                return
            self._write()
            if self._queue:
                self._reactor.change(self._fd, self._events())

    def _send_at_once(self, buffer: Buffer) -> bool:
        """The short way, when nothing is queued; whether the buffer needs no more attention."""
        with self._lock:
            if self._queue or self._is_closed:
                return self._is_closed
            try:
                sent = self._sock.send(buffer)
            except OSError:  # full, or broken: the long way finds out
                return False
            if sent < len(buffer):
                self.num_queued_bytes += len(buffer) - sent
                self._queue.append((memoryview(buffer)[sent:], ()))
                self._reactor.change(self._fd, self._events())
            return True

    def read_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Read in the calling thread until ``is_done()``, unless another thread reads.

        If the last answer came soon, this polls for a moment before it sleeps, as waking up takes
        longer. It may return earlier: when the stream is closed, or after ``timeout_s`` (0 for
        none).
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            if self._is_closed or not self._leave_to_caller(True):
                return
            self._reactor.reader.is_reading = True
            poller = self._poller
            began = time.monotonic()
            deadline = began + timeout_s if timeout_s > 0 else math.inf
            spin_until = began + self._spin_s if self._answers_soon else 0.0
            while not (is_done() or self._is_closed or self._broken_by):
                if poller.poll(0):
                    self._read(1)
                elif time.monotonic() < spin_until:
                    os.sched_yield()  # to the callee, should it be on this very core
                elif (left_s := deadline - time.monotonic()) <= 0:
                    break
                elif poller.poll(min(left_s, _LONGEST_SLEEP_S) * 1000):
                    self._read(1)
            self._answers_soon = time.monotonic() - began < 2 * SPIN_S
        finally:
            self._reactor.reader.is_reading = False
            # before the release: else this would end the turn of the next caller that reads
            self._leave_to_caller(False)
            self._reading.release()

    def _leave_to_caller(self, is_left: bool) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            self._is_read_by_caller = is_left
            self._reactor.change(self._fd, self._events())
            return True

    def _events(self) -> int:
        """What the loop watches the socket for (under the lock)."""
        return (0 if self._is_read_by_caller else READ) | (WRITE if self._queue else 0)

    def take_descriptor(self) -> int:
        """The oldest descriptor received beside the bytes; the caller closes it.

        Raises:
            ProtocolError: when there is none.
        """
        if not self._descriptors:
            raise ProtocolError("a frame without its descriptor", "one beside its first byte")
        return self._descriptors.popleft()

    def close(self, reason: str) -> None:
        """Close the socket (on the loop)."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._queue.clear()
            self.num_queued_bytes = 0
        self._reactor.forget(self._fd)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the turn of a caller that reads
        with self._reading:
            self._sock.close()
            # now, as this stream may stay in a cycle until the garbage collector runs
            self._reader.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._on_closed(reason)

    def close_soon(self, reason: str) -> None:
        """Have the loop close it, from any thread."""
        self._reactor.call_soon(lambda: self.close(reason))

    def _drain_and_close(self, reason: str) -> None:
        """Close a stream that cannot be written, after reading the peer's last frames.

        These may be answers or a goodbye.
        """
        # a caller that reads drains the socket itself, and soon lets go of the lock
        if self._reading.acquire(timeout=_READER_LEAVES_S):
            try:
                for _ in range(_LAST_ROUNDS):  # a peer may close its side and write on for ever
                    if self._is_closed or self._broken_by or not self._poller.poll(0):
                        break
                    self._read(_READS_AT_A_TIME)
            finally:
                self._reading.release()
        self.close(self._broken_by or reason)

    def _on_events(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE and not self._is_closed and self._reading.acquire(blocking=False):
            try:
                self._read(_READS_AT_A_TIME)
            finally:
                self._reading.release()
            if self._broken_by:
                self.close(self._broken_by)
        if self._queue or self._reader.is_within_payload:
            self._reactor.expect_bulk()

    def _flush(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._write()
            drained = not self._queue
            if drained:
                self._reactor.change(self._fd, self._events())
        if drained:
            self._on_drained(self)

    def _write(self) -> None:
        """Write as much of the queue as the kernel takes (under the lock); does not raise."""
        try:
            while self._queue:
                sent = self._send_some()
                self.num_queued_bytes -= sent
                while sent:
                    view, _ = self._queue.popleft()
                    if view.nbytes > sent:
                        self._queue.appendleft((view[sent:], ()))
                        break
                    sent -= view.nbytes
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            reason = str(error)
            self._reactor.call_soon(lambda: self._drain_and_close(reason))

    def _send_some(self) -> int:
        view, descriptors = self._queue[0]
        if descriptors:
            sent = socket.send_fds(self._sock, [view], [each.fd for each in descriptors])
            for each in descriptors:
                each.close_fd()
            self._queue[0] = (view, ())
            return sent
        if len(self._queue) == 1 or self._tls is not None:
            return self._sock.send(view)
        batch: list[memoryview] = []
        for view, descriptors in self._queue:
            if descriptors or len(batch) == _MAX_BUFFERS:
                break
            batch.append(view)
        return self._sock.sendmsg(batch)

    def _read(self, num_reads: int) -> None:
        """Receive and handle frames until nothing is left; the caller holds ``_reading``."""
        if self._broken_by:
            return
        try:
            for _ in range(num_reads):
                target = self._reader.buffer()
                num_bytes = self._receive(target)
                if num_bytes == 0:
                    self._fail("the connection was closed")
                    return
                frames = self._reader.received(num_bytes)
                for frame in frames:
                    self._on_frame(frame)
                if self._reader.num_staged:
                    self._watch_stall()
                if self._is_closed or (num_bytes < len(target) and self._tls is None):
                    return
            if self._tls is not None and self._tls.pending():
                self._reactor.call_soon(lambda: self._on_events(READ))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            reason = str(error) if not isinstance(error, RpcError) else error.args[0]
            self._fail("its host gives no sign of life" if is_silence(error) else reason)
        except RpcError as error:
            self._fail(str(error))
        except Exception as error:
            # a fault in this program: the stream cannot go on in the middle of a frame
            log.exception("a frame could not be handled")
            self._fail(f"{type(error).__name__}: {error}")

    def _watch_stall(self) -> None:
        """Plan to check in a while whether the frame that was begun is complete."""
        if not self._is_stall_watched:
            self._is_stall_watched = True
            # a timer must not keep a closed stream, and its buffer
            check = functools.partial(
                _check_stall, weakref.ref(self), self._reader.num_frames, self._reader.num_staged
            )
            self._reactor.call_at(time.monotonic() + STALL_S, check)

    def check_stall(self, num_frames: int, num_staged: int) -> None:
        """Close a stream whose begun frame does not come, as all later ones would be lost in it.

        A sender writes whole frames, so the length in the header of such a frame is wrong. There is
        one check at a time, on the loop.

        Args:
            num_frames: that were begun when this was planned.
            num_staged: bytes that there were then of the one that was not complete.
        """
        self._is_stall_watched = False
        if self._is_closed or not self._reader.num_staged:
            return
        is_same = self._reader.num_frames == num_frames
        if is_same and self._reader.num_staged - num_staged < STALL_BYTES:
            self.close(
                f"a frame was begun {STALL_S:g} s ago and does not come; the length in its header"
                " may be damaged"
            )
        else:
            self._watch_stall()

    def _fail(self, reason: str) -> None:
        """Read no more; the loop then closes the stream."""
        self._broken_by = self._broken_by or reason
        if not self._reactor.is_loop_thread():
            self._reactor.call_soon(lambda: self.close(reason))

    def _receive_specially(self, target: memoryview) -> int:
        if self._tls is not None:
            with self._lock:
                # an OpenSSL object is for one thread at a time, even if one reads and one writes
                return self._sock.recv_into(target)
        num_bytes, descriptors, is_cut = receive_descriptors(self._sock, target)
        # before the check: descriptors in this queue are closed with the stream
        self._descriptors.extend(descriptors)
        if is_cut or len(self._descriptors) > MAX_DESCRIPTORS:
            raise ProtocolError("too many descriptors at once", f"at most {MAX_DESCRIPTORS}")
        return num_bytes


def _check_stall(stream: weakref.ref[FrameStream], num_frames: int, num_staged: int) -> None:
    if (one := stream()) is not None:
        one.check_stall(num_frames, num_staged)
