"""An attacker with a raw socket, who may know the secret or not."""

import contextlib
import fcntl
import itertools
import os
import random
import select
import socket
import time

from hostility import SECRET, TIMEOUT_S
from mutations import call_of

from pibroch.rpc.transport.frames import HEADER, MAGIC, VERSION, FrameReader, Kind, header
from pibroch.wire.handshake import Client
from pibroch.wire.handshake_messages import Identity, Purpose

_BATCH = 8  # frames between two honest calls on the attacker's connection
_PING = 0x_5A17_0000_5A17_0000


class Attacker:
    """A connection that is ours to misuse."""

    ID = 666
    INCARNATION = 13

    def __init__(self, target, *, unix=True, timeout_s=TIMEOUT_S):
        self.target = target
        self.socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self.socket.settimeout(timeout_s)
        self._connect("\0" + target["unix"] if unix else (target["host"], target["port"]))
        self._arrived = []
        self.reader = FrameReader(
            1 << 26, 1 << 30, lambda frame: [memoryview(bytearray(frame.payload_bytes))]
        )

    def _connect(self, address):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self.socket.connect(address)
            except BlockingIOError:
                # more connections wait to be accepted than a Unix socket lets wait
                assert time.monotonic() < deadline, "nobody accepts"
                time.sleep(0.001)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def shake_hands(
        self, secret=SECRET, expected=None, name="eve", connection_id=None, stream=0, **client
    ):
        """A handshake; returns all that was sent."""
        core = Client(
            secret,
            Identity(name, self.ID, self.INCARNATION),
            expected or self.target["name"],
            Purpose(connection_id or random.getrandbits(62), stream),
            **client,
        )
        sent = b""
        while not core.done:
            data = self.socket.recv(4096)
            assert data, "closed without a reason"
            reply = core.receive(data)
            sent += reply
            self.socket.sendall(reply)
        return sent

    def send(self, data, descriptors=()):
        """Send it; closed connections swallow it."""
        with contextlib.suppress(ConnectionError):
            if descriptors:
                socket.send_fds(self.socket, [data], list(descriptors))
            else:
                self.socket.sendall(data)

    def frames(self, count):
        """The next ``count`` frames that come back."""
        while len(self._arrived) < count:
            num_bytes = self.socket.recv_into(self.reader.buffer())
            assert num_bytes, f"closed after {len(self._arrived)} frames"
            self._arrived += self.reader.received(num_bytes)
        result = self._arrived[:count]
        self._arrived = self._arrived[count:]
        return result

    def request(self, metadata, payload=b""):
        """A request, and the frame that answers it."""
        self.send(header(Kind.REQUEST, 9, len(metadata), len(payload)) + metadata + payload)
        while (frame := self.frames(1)[0]).kind not in (Kind.ANSWER, Kind.FAILURE):
            pass  # what is reported about shared memory
        return frame

    def wait_closed(self):
        """Until the worker has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass


def bombard(target, frames, *, admitted):
    """Send ``frames`` over as many connections as it takes, reading all that comes back.

    Returns how many of both.
    """
    sent = connections = 0
    batches = _batches(frames) if admitted else _tens(frames)
    batch = next(batches, None)
    while batch:
        with Attacker(target, unix=bool(connections % 2) or admitted) as attacker:
            connections += 1
            if admitted:
                attacker.shake_hands()
            is_open = True
            while batch and is_open:
                is_open = _push(attacker.socket, b"".join(batch)) and admitted
                is_open = is_open and _is_in_step(batch[-1]) and _still_answers(attacker.socket)
                sent += len(batch)
                batch = next(batches, None)
    return sent, connections


def _still_answers(connection):
    """Whether the worker has understood all so far as frames: it answers an honest call."""
    metadata = call_of("hostility:echo", 1)
    if not _push(connection, header(Kind.REQUEST, _PING, len(metadata), 0) + metadata):
        return False
    result = b""
    connection.settimeout(TIMEOUT_S)
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 20):
            result = result[-7:] + data
            if _PING.to_bytes(8, "little") in result:
                return True
    return False


def _batches(frames):
    """Frames in groups that end early where the stream gets out of step.

    What follows there would not be looked at.
    """
    batch = []
    for frame in frames:
        batch.append(frame)
        if len(batch) == _BATCH or not _is_in_step(frame):
            yield batch
            batch = []
    if batch:
        yield batch


def _is_in_step(data):
    """Whether whole frames begin and end with ``data``."""
    while len(data) >= HEADER.size:
        magic, version, kind, metadata_bytes, _, payload_bytes = HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION or kind not in range(1, 10):
            return False
        end = HEADER.size + metadata_bytes + payload_bytes
        if end > len(data):
            return False
        data = data[end:]
    return not data


def _tens(frames):
    while batch := list(itertools.islice(frames, 10)):
        yield batch


def _push(connection, data):
    """Send while taking what comes; false when the connection was closed before all was sent."""
    view = memoryview(data)
    deadline = time.monotonic() + TIMEOUT_S
    connection.setblocking(False)
    while view:
        assert time.monotonic() < deadline, "the worker neither reads nor closes"
        readable, _, _ = select.select([connection], [connection], [], 1)
        try:
            if readable and not connection.recv(1 << 20):
                return False
            with contextlib.suppress(BlockingIOError):
                view = view[connection.send(view) :]
        except BlockingIOError:
            continue
        except ConnectionError:
            return False
    return True


def descriptors_of(kind):
    """A descriptor of 1 MiB that is not what it should be."""
    if kind == "file":
        return os.open("/proc/self/exe", os.O_RDONLY)
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(writing)
        return reading
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20 if kind != "short" else 1 << 10)
    both = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    seals = {"unsealed": 0, "may grow": fcntl.F_SEAL_SHRINK, "may shrink": fcntl.F_SEAL_GROW}.get(
        kind, both
    )
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
