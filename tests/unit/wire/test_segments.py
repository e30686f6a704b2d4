import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pibroch.errors import ProtocolError
from pibroch.wire.segments import (
    ForeignSegment,
    OwnSegment,
    view,
    write,
)

KIB = 1 << 10
MIB = 1 << 20


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:pibroch" in line for line in lines)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()  # what other tests left would else go in the midst of one
    before = open_fds(), maps()
    yield
    if (open_fds(), maps()) != before:
        gc.collect()
    assert (open_fds(), maps()) == before


def pair(nbytes: int) -> tuple[OwnSegment, ForeignSegment]:
    """Both ends of one segment, two maps of the same memory."""
    own = OwnSegment.create(nbytes, segment_id=5)
    foreign = ForeignSegment.open(os.dup(own.fd), nbytes, segment_id=5)
    own.close_fd()
    return own, foreign


class Deaths:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 5), (200, 300), (2, 1, 3, 1)], ids=str)
def test_what_is_written_is_what_the_other_side_sees(dtype, shape):
    own, foreign = pair(MIB)
    tensor = torch.randint(0, 2, shape).to(dtype)
    write(own, 128, tensor)
    died = Deaths()
    seen = view(foreign, 128, dtype, shape, died)
    assert seen.dtype == dtype
    assert seen.shape == tensor.shape
    assert seen.is_contiguous()
    assert not seen.requires_grad
    assert seen.tolist() == tensor.tolist()
    assert died.count == 0
    del seen
    assert died.count == 1


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x[0].expand(7, 64),
        lambda x: torch.view_as_complex(x.view(64, 32, 2)).conj(),
        lambda x: torch.view_as_complex(x.view(64, 32, 2)).conj().imag,
        lambda x: x.requires_grad_() * 2,
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative", "computed", "leaf"],
)
def test_any_cpu_tensor_can_be_written(of: Callable[[Tensor], Tensor]):
    own, foreign = pair(MIB)
    tensor = of(torch.randn(64, 64))
    write(own, 0, tensor)
    assert torch.equal(view(foreign, 0, tensor.dtype, tensor.shape, Deaths()), tensor)


@pytest.mark.parametrize("nbytes", [64 * KIB, 64 * KIB + 4, 4 * MIB, 17 * MIB])
def test_every_way_of_copying_copies_all_and_nothing_beside(nbytes):
    own, foreign = pair(18 * MIB)
    own.bytes.fill_(3)
    tensor = torch.randn(nbytes // 4)
    write(own, 4096, tensor)
    assert torch.equal(view(foreign, 4096, torch.float32, tensor.shape, Deaths()), tensor)
    rest = torch.cat([foreign.bytes[:4096], foreign.bytes[4096 + nbytes :]])
    assert (rest == 3).all()


@pytest.mark.parametrize(
    ("offset", "count"), [(-64, 1), (4096, 1), (4096, 0), (64, 1024), (0, 1025), (1 << 62, 4)]
)
def test_nothing_is_written_or_seen_outside_the_segment(offset, count):
    own, _ = pair(4096)
    with pytest.raises(ValueError, match=f"at {offset}, need a place within the segment's 4096"):
        write(own, offset, torch.zeros(count))
    with pytest.raises(ValueError, match="need a place within"):
        view(own, offset, torch.float32, (count,), Deaths())


def some_memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("pibroch-test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: some_memfd(4096, 0), "can be resized"),
        (lambda: some_memfd(4096, fcntl.F_SEAL_GROW), "can be resized"),
        (lambda: some_memfd(4096, fcntl.F_SEAL_SHRINK), "can be resized"),
        (lambda: some_memfd(2048, BOTH), "2048 bytes, announced as 4096"),
        (lambda: some_memfd(0, BOTH), "0 bytes, announced as 4096"),
        (lambda: some_memfd(4096, BOTH | fcntl.F_SEAL_WRITE), "not permitted"),
        (lambda: os.open("/", os.O_RDONLY), "not a file"),
        (lambda: os.open("/proc/self/status", os.O_RDONLY), "0 bytes"),
    ],
)
def test_a_segment_that_could_make_us_fail_is_refused_and_closed(make, reason):
    check_refused_and_closed(make(), reason)


def check_refused_and_closed(fd, reason):
    with pytest.raises(ProtocolError, match=reason):
        ForeignSegment.open(fd, 4096)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_a_pipe_is_no_segment():
    reader, writer = os.pipe2(os.O_CLOEXEC)
    check_refused_and_closed(reader, "not a file")
    os.close(writer)


def test_no_size_and_no_disk_file_passes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    for fd, nbytes in ((os.open(path, os.O_RDWR), 4096), (some_memfd(0, BOTH), 0)):
        with pytest.raises(ProtocolError):
            ForeignSegment.open(fd, nbytes)


def test_an_own_segment_cannot_be_resized():
    own = OwnSegment.create(8192)
    for nbytes in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(own.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(own.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_map_outlives_its_segment_object_while_a_view_lives():
    own, foreign = pair(MIB)
    write(own, 0, torch.arange(1000))
    died = Deaths()
    seen = view(foreign, 0, torch.int64, (1000,), died)
    alias = seen[10:].numpy()
    before = maps()
    del own, foreign
    assert maps() == before - 1
    del seen
    assert (maps(), died.count) == (before - 1, 0)
    assert alias[:3].tolist() == [10, 11, 12]
    del alias
    assert (maps(), died.count) == (before - 2, 1)


ALIASES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda t: t,
    "container": lambda t: {"a": [t]},
    "slice": lambda t: t[1:],
    "reshaped": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "parameter": torch.nn.Parameter,
    "numpy": lambda t: t.numpy(),
    "numpy of slice": lambda t: t[1:].numpy(),
    "tensor of numpy": lambda t: torch.from_numpy(t.numpy()),
    "memoryview": lambda t: t.numpy().data,
    "dlpack": torch._C._to_dlpack,
    "numpy by dlpack": np.from_dlpack,
    "storage": lambda t: t.untyped_storage(),
    "set from storage": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "saved by autograd": lambda t: torch.ones(4, 4, requires_grad=True) * t,
    "saved detached": lambda t: torch.ones(4, 4, requires_grad=True) * t.detach(),
    "future": lambda t: torch.futures.Future().then(lambda _: None) and done_with(t),
    "bound method": lambda t: t.add_,
    "closure": lambda t: lambda: t,
    "iterator": iter,
    "sparse": lambda t: torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), t[:2, 0], check_invariants=True
    ),
    "gradient": lambda t: with_gradient(t),
    "thread": lambda t: threading.Thread(target=print, args=(t,)),
    "its own gradient's": lambda t: t.requires_grad_().exp(),
}


def done_with(tensor: Tensor) -> object:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def with_gradient(tensor: Tensor) -> Tensor:
    weight = torch.ones(4, 4, requires_grad=True)
    weight.grad = tensor
    return weight


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_keeps_the_bytes(name):
    own, _ = pair(4096)
    died = Deaths()
    tensor = view(own, 64, torch.float32, (4, 4), died)
    alias = ALIASES[name](tensor)
    del tensor
    assert died.count == 0
    del alias
    assert died.count == 1


def test_views_die_once_each_on_any_thread_and_in_cycles():
    own, _ = pair(MIB)
    deaths = [Deaths() for _ in range(400)]
    barrier = threading.Barrier(4)

    def use(mine: list[Deaths]) -> None:
        barrier.wait(60)
        for died in mine:
            tensor = view(own, 64, torch.float32, (16,), died)
            cycle: list[object] = [tensor, tensor[1:].numpy()]
            cycle.append(cycle)

    threads = [threading.Thread(target=use, args=(deaths[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    gc.collect()
    assert {died.count for died in deaths} == {1}


def test_memory_does_not_grow_with_views_and_segments():
    def resident() -> int:
        with open("/proc/self/statm") as line:
            return int(line.read().split()[1]) * mmap.PAGESIZE

    def work(rounds: int) -> None:
        for i in range(rounds):
            own, foreign = pair(MIB + 4096 * (i % 50))
            write(own, 0, torch.ones(1000))
            for _ in range(20):
                assert view(foreign, 0, torch.float32, (1000,), Deaths())[0] == 1

    work(200)
    before = resident()
    work(1000)
    assert resident() < before + 4 * MIB


AT_EXIT = """
import os, sys, threading, torch
from pibroch.wire.segments import OwnSegment, view
own = OwnSegment.create(1 << 20)
def make(n):
    return view(own, 64 * n, torch.float32, (16,), lambda: os.write(1, b"%d\\n" % n))
kept = make(1)
class Holder:
    held = make(2)
cycle = [make(3)]
cycle.append(cycle)
sys.kept = make(4).numpy()
weight = torch.ones(16, requires_grad=True)
product = (weight * make(5)).sum()
def run(tensor=make(6)):
    threading.Event().wait()
threading.Thread(target=run, daemon=True).start()
passing = make(7)
del passing
"""


def test_views_that_live_until_the_interpreter_ends_do_no_harm():
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    died = done.stdout.split()
    assert died[0] == "7"
    assert len(died) == len(set(died)), "each at most once"


PEER = """
import socket, sys, torch
from pibroch.wire.segments import ForeignSegment, view
line = socket.socket(fileno=int(sys.argv[1]))
_, (fd,), _, _ = socket.recv_fds(line, 16, 1)
segment = ForeignSegment.open(fd, 20 << 20)
tensor = view(segment, 4096, torch.float32, (1000, 1000), lambda: line.sendall(b"f"))
line.sendall(b"s" if torch.equal(tensor, torch.arange(1e6).view(1000, 1000)) else b"d")
tensor.add_(1)
del segment
line.recv(1)
del tensor
"""


def test_a_real_peer_sees_the_bytes_changes_them_and_frees_them():
    own = OwnSegment.create(20 * MIB)
    write(own, 4096, torch.arange(1e6).view(1000, 1000))
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        command = [sys.executable, "-c", PEER, str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as peer:
            try:
                socket.send_fds(ours, [b"segment"], [own.fd])
                own.close_fd()
                assert ours.recv(1) == b"s"
                ours.sendall(b"g")
                assert ours.recv(1) == b"f"
                assert peer.wait(60) == 0
            finally:
                peer.kill()
    assert torch.equal(view(own, 4096, torch.float32, (1000000,), Deaths()), torch.arange(1e6) + 1)


HOLDER = """
import socket, sys
from pibroch.wire.segments import ForeignSegment
line = socket.socket(fileno=int(sys.argv[1]))
_, (fd,), _, _ = socket.recv_fds(line, 16, 1)
segment = ForeignSegment.open(fd, 1 << 20)
line.sendall(b"h")
line.recv(1)
"""


def test_a_killed_peer_leaves_the_segment_usable():
    own = OwnSegment.create(MIB)
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    command = [sys.executable, "-c", HOLDER, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as peer:
        try:
            socket.send_fds(ours, [b"segment"], [own.fd])
            assert ours.recv(1) == b"h"
        finally:
            peer.kill()
    write(own, 4096, torch.ones(100))
    assert view(own, 4096, torch.float32, (100,), Deaths()).sum() == 100
