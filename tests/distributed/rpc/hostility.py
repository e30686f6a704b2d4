"""An attacker with a raw socket, what it says, and what the attacked workers do meanwhile."""

import collections
import contextlib
import fcntl
import itertools
import logging
import os
import random
import re
import resource
import select
import socket
import time
from dataclasses import dataclass

import torch
from mutations import call_of

from pibroch import rpc
from pibroch.rpc import autograd
from pibroch.rpc.connection import Connection
from pibroch.rpc.frames import HEADER, MAGIC, VERSION, FrameReader, Kind, header
from pibroch.rpc.handshake import Client, Identity, Purpose
from pibroch.rpc.messages import Call
from pibroch.rpc.stream import Stream

SECRET = b"the secret of the job under attack"
PATIENCE_S = 20
_BATCH = 8  # frames between two honest calls on the attacker's connection
_PING = 0x_5A17_0000_5A17_0000

# in the workers


@dataclass
class Pair:
    a: object
    b: object


class Counter:
    """Something to refer to."""

    def __init__(self, count):
        self.count = count
        self.array = torch.zeros(3).numpy()

    def up(self, by):
        self.count += by
        return self.count


class _Log(logging.Handler):
    """Counts what was logged and keeps one line of each kind."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines, self.count = collections.Counter(), 0

    def emit(self, record):
        self.count += 1
        line = f"{record.levelname} {record.getMessage()}"
        if record.exc_info:
            line += f" {record.exc_info[0].__name__}: {record.exc_info[1]}"
        line = re.sub(r"[0-9]+", "0", line) if self.count > 1000 else line
        if len(self.lines) < 10_000:
            self.lines[line[:300]] += 1


_log = _Log()
_record = []
_original_send = Stream.send
_seen = collections.Counter()
_original_on_frame = Connection.on_frame


def listen_to_log():
    logger = logging.getLogger("pibroch")
    logger.propagate = False
    if _log not in logger.handlers:
        logger.addHandler(_log)
        logger.setLevel(logging.INFO)
    _log.lines.clear()
    _log.count = 0


def logged():
    """Lines so far."""
    return list(_log.lines)


def target():
    """Where this worker listens, and its process."""
    from pibroch.rpc.agent import current_agent

    record = current_agent()._peers.record
    return {"name": record.name, "unix": record.unix, "host": record.host, "port": record.port, "pid": os.getpid()}


def incarnation():
    from pibroch.rpc.agent import current_agent

    return current_agent().incarnation


def state():
    """What must not grow."""
    with open("/proc/self/status") as status:
        memory = {
            line.split(":")[0]: int(line.split()[1]) << 10 for line in status if line.startswith(("VmRSS", "VmHWM"))
        }
    connections = len([name for name in os.listdir("/proc/self/fd") if _is_socket(name)])
    return {
        "rss": memory["VmRSS"],
        "peak": memory["VmHWM"],
        "files": len(os.listdir("/proc/self/fd")),
        "sockets": connections,
    }


def forget_peak():
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def start_counting():
    """Count the frames that are understood as such."""

    def on_frame(self, frame):
        _seen[frame.kind] += 1
        _original_on_frame(self, frame)

    _seen.clear()
    Connection.on_frame = on_frame


def counted():
    Connection.on_frame = _original_on_frame
    return {kind.name: count for kind, count in _seen.items()}


def limit_files(num_more):
    """Let this process open so many files more; without a number as many as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most if num_more is None else max(map(int, os.listdir("/proc/self/fd"))) + 1 + num_more
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _is_socket(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket")
    except OSError:
        return False


def add(a, b):
    return a + b


def echo(value):
    return value


def fail(text):
    raise ValueError(text)


def _private():
    return "secret"


def honest_call(to):
    """A tensor there and back; large enough for shared memory."""
    value = torch.arange(50_000.0)
    return bool(torch.equal(rpc.rpc_sync(to, add, (value, 1)), value + 1))


def start_recording():
    def send(self, buffers, descriptors=()):
        kept = [bytes(buffer) for buffer in buffers]
        _record.append(b"".join(kept))
        _original_send(self, kept, descriptors)

    Stream.send = send


def recorded():
    """All that was sent since ``start_recording``."""
    Stream.send = _original_send
    frames = [*_record]
    _record.clear()
    return frames


def varied_calls(to):
    """Calls with all sorts of values, so that there is something to record."""
    values = [
        *(None, True, 5, 2**70, -1.5, 1j, "text", b"bytes", bytearray(b"more"), ..., range(3), slice(1, 2)),
        *([1, [2, [3]]], (1, (2, (3,))), {"a": 1}, {1: 2, (3, 4): 5}, {6, 7}, frozenset({8}), Pair(1, [torch.ones(2)])),
        *(torch.float32, torch.device("cpu"), torch.Size([1]), add, Pair, torch.add),
        *(
            torch.arange(5),
            torch.ones(2, 3, dtype=torch.bfloat16),
            torch.zeros(0, 4),
            torch.tensor(1.0),
            torch.ones(3, 1000),
        ),
        *(torch.ones(2).numpy(), torch.nn.Parameter(torch.ones(1)), torch.eye(3).to_sparse()),
    ]
    for value in values:
        rpc.rpc_sync(to, echo, (value,))
    rpc.rpc_sync(to, add, kwargs={"a": torch.ones(20_000), "b": 1})
    counter = rpc.remote(to, Counter, (1,))
    assert rpc.rpc_sync(to, echo, (counter,)).rpc_sync().up(2) == 3
    assert rpc.remote(to, torch.add, (torch.ones(2), 1)).to_here().sum() == 4
    for _ in range(3):
        with autograd.context() as context:
            weight = torch.ones(3, requires_grad=True)
            autograd.backward(context, [rpc.rpc_sync(to, torch.mul, (weight, 2)).sum()])
            assert autograd.get_gradients(context)[weight].sum() == 6
    for function, args in [(fail, ("expected",)), (torch.add, (1, 2))]:
        with contextlib.suppress(ValueError, TypeError):
            rpc.rpc_sync(to, function, args)
    return True


def call_for_error(to, function_name):
    """Name and text of the error that a call of a function by this name gives its caller."""
    from pibroch.rpc.agent import current_agent

    agent = current_agent()
    try:
        agent.request_sync(agent.find(to), Call(function_name), [[], {}])
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def call_as_stranger(name, port, secret):
    """Join with another secret and call the others; the error's name and text."""
    import rpc_crew

    rpc_crew.join(name, 7, 2, port, {"secret": secret})
    try:
        rpc.rpc_sync("worker0", add, (1, 2), timeout=PATIENCE_S)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        rpc.shutdown(graceful=False)
    return "", "no error"


# the attacker


class Attacker:
    """A connection that is ours to misuse."""

    ID, INCARNATION = 666, 13

    def __init__(self, target, *, unix=True, timeout_s=PATIENCE_S):
        self.target = target
        self.socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self.socket.settimeout(timeout_s)
        self._connect("\0" + target["unix"] if unix else (target["host"], target["port"]))
        self._arrived = []
        self.reader = FrameReader(1 << 26, 1 << 30, lambda frame: [memoryview(bytearray(frame.payload_bytes))])

    def _connect(self, address):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.socket.connect(address)
            except BlockingIOError:  # more connections wait to be accepted than a Unix socket lets wait
                assert time.monotonic() < deadline, "nobody accepts"
                time.sleep(0.001)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def shake_hands(self, secret=SECRET, expected=None, name="eve", **client):
        """A handshake; returns all that was sent."""
        core = Client(
            secret,
            Identity(name, self.ID, self.INCARNATION),
            expected or self.target["name"],
            Purpose(random.getrandbits(62)),
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
        found, self._arrived = self._arrived[:count], self._arrived[count:]
        return found

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
    """Send ``frames`` over as many connections as it takes, reading all that comes back; how many of both."""
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
    found = b""
    connection.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 20):
            found = found[-7:] + data
            if _PING.to_bytes(8, "little") in found:
                return True
    return False


def _batches(frames):
    """Frames in groups that end early where the stream gets out of step: what follows there would not be looked at."""
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
    view, deadline = memoryview(data), time.monotonic() + PATIENCE_S
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
    seals = {"unsealed": 0, "may grow": fcntl.F_SEAL_SHRINK, "may shrink": fcntl.F_SEAL_GROW}.get(kind, both)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
