"""Workers under attack: honest calls, a log that can be read, measurements."""

import collections
import contextlib
import logging
import os
import re
import resource
import threading
import time
from dataclasses import dataclass

import torch

from pibroch import rpc
from pibroch.rpc import autograd
from pibroch.rpc.transport import connection, stream
from pibroch.rpc.transport.connection import Connection
from pibroch.rpc.transport.stream import FrameStream
from pibroch.rpc.values.messages import Call

SECRET = b"the secret of the job under attack"
TIMEOUT_S = 60
STALL_S = 0.5


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


class Layer(torch.nn.Linear):
    """A layer that peers may make."""


def as_array(tensor):
    """An array, which has methods that write files."""
    return tensor.numpy()


class _Log(logging.Handler):
    """Counts what was logged and keeps one line of each kind."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = collections.Counter()
        self.count = 0

    def emit(self, record):
        self.count += 1
        line = f"{record.levelname} {record.getMessage()}"
        if record.exc_info:
            line += f" {record.exc_info[0].__name__}: {record.exc_info[1]}"
        line = re.sub(r"[0-9]+", "0", line) if self.count > 1000 else line
        if len(self.lines) < 10_000:
            self.lines[line[:300]] += 1


_log = _Log()
_record: list = []
_entered = threading.Event()
_released = threading.Event()
_original_send = FrameStream.send
_seen: collections.Counter = collections.Counter()
_stalls: list = []
_watching: list = []
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
    from pibroch.rpc.calls.agent import current_agent

    record = current_agent()._peers.record
    return {
        "name": record.name,
        "unix": record.unix,
        "host": record.host,
        "port": record.port,
        "pid": os.getpid(),
    }


def incarnation():
    from pibroch.rpc.calls.agent import current_agent

    return current_agent().incarnation


def state():
    """What must not grow."""
    with open("/proc/self/status") as status:
        memory = {
            line.split(":")[0]: int(line.split()[1]) << 10
            for line in status
            if line.startswith(("VmRSS", "VmHWM"))
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


def seen(kind):
    """Frames of a kind since ``start_counting``."""
    return _seen[kind]


def bytes_owed(name):
    """What a worker has not taken."""
    from pibroch.rpc.calls.agent import current_agent

    return sum(
        each.bytes_owed for each in current_agent()._peers.connections() if each.peer.name == name
    )


def limit_unread(num_bytes):
    """How much of errors may lie unread before a peer is lost."""
    connection.UNREAD_BYTES = num_bytes


def is_busy():
    from pibroch.rpc.calls.agent import current_agent

    return current_agent().is_busy()


def counted():
    Connection.on_frame = _original_on_frame
    return {kind.name: count for kind, count in _seen.items()}


def watch_for_stalls():
    """Note when the interpreter's lock was held for long.

    This thread did not run, while the process computed.
    """
    _stalls.clear()
    if not _watching:
        _watching.append(threading.Thread(target=_watch, daemon=True))
        _watching[0].start()


def _watch():
    before = time.process_time()
    while True:
        time.sleep(0.02)
        now = time.process_time()
        if now - before > STALL_S:
            _stalls.append(now - before)
        before = now


def stalls():
    """How long, in seconds of CPU time, each was."""
    return list(_stalls)


def limit_files(num_more):
    """Let this process open so many files more; without a number as many as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = (
        most if num_more is None else max(map(int, os.listdir("/proc/self/fd"))) + 1 + num_more
    )
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


def ones(num_bytes):
    return torch.ones(num_bytes, dtype=torch.uint8)


def fail(text):
    raise ValueError(text)


def answer_when_released():
    _entered.set()
    assert _released.wait(TIMEOUT_S)
    return "true"


def call_that_waits(to):
    return rpc.rpc_sync(to, answer_when_released)


def wait_until_entered():
    assert _entered.wait(TIMEOUT_S)


def release():
    _released.set()


def __private():
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

    FrameStream.send = send


def recorded():
    """All that was sent since ``start_recording``."""
    FrameStream.send = _original_send
    frames = [*_record]
    _record.clear()
    return frames


def varied_calls(to):
    """Calls with all sorts of values, so that there is something to record."""
    values = [
        *(
            None,
            True,
            5,
            2**70,
            -1.5,
            1j,
            "text",
            b"bytes",
            bytearray(b"more"),
            ...,
            range(3),
            slice(1, 2),
        ),
        *(
            [1, [2, [3]]],
            (1, (2, (3,))),
            {"a": 1},
            {1: 2, (3, 4): 5},
            {6, 7},
            frozenset({8}),
            Pair(1, [torch.ones(2)]),
        ),
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
    from pibroch.rpc.calls.agent import current_agent

    agent = current_agent()
    try:
        agent.request_sync(agent.find(to), Call(function_name), [[], {}])
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def call_as_stranger(name, port, secret):
    """Join with another secret and call the others; the error's name and text."""
    import rpc_team

    rpc_team.join(name, 7, 2, port, {"secret": secret})
    try:
        rpc.rpc_sync("worker0", add, (1, 2), timeout=TIMEOUT_S)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        rpc.shutdown(graceful=False)
    return "", "no error"


def left_behind():
    """All that is kept for peers, by kind."""
    from pibroch.rpc.calls.agent import current_agent

    agent = current_agent()
    return {
        **{
            f"autograd {kind}": count for kind, count in agent.packer.recorder.live_counts().items()
        },
        **{
            f"references {kind}": count
            for kind, count in agent.packer.references.live_counts().items()
        },
        "workers met": len(agent.packer.references._workers),
        "workers lost": len(agent._peers._lost),
        "busy": int(agent.is_busy()),
    }


def corrupt_next_length(by):
    """Damage the length of the metadata in the next frame that is sent."""
    original = FrameStream.send

    def send(self, buffers, descriptors=()):
        FrameStream.send = original
        first = bytearray(buffers[0])
        length = int.from_bytes(first[4:8], "little")
        first[4:8] = (length + by).to_bytes(4, "little")
        original(self, [bytes(first), *buffers[1:]], descriptors)

    FrameStream.send = send


def give_up_frames_after(seconds):
    """How long a frame that was begun is waited for here; returns how long it was before."""
    before = stream.STALL_S
    stream.STALL_S = seconds
    return before


def call_until_it_works(to, timeout):
    """How many calls failed, with which errors, before one succeeded."""
    errors = []
    while len(errors) < 20:
        try:
            assert rpc.rpc_sync(to, add, (1, 2), timeout=timeout) == 3
            return errors
        except RuntimeError as error:
            errors.append(type(error).__name__)
    raise AssertionError(errors)
