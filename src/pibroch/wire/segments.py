"""Shared memory without names: sealed memfds, maps of them, and tensors that lie in them.

A segment is made by the sender of tensors and opened by their receiver, which gets its descriptor
by ``SCM_RIGHTS``. It is sealed against shrinking and growing, so that no peer can make reading it
fail. A tensor on it (``view``) has a storage of its own; when the last tensor, view or array on
that storage is gone, the bytes are reported as free. A map lives as long as its segment object and
the views on it, and needs no descriptor. Nothing has a name, so a killed process leaves nothing
behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.errors import ProtocolError

HOLD_GIL_BYTES = 64 << 10
ONE_THREAD_BYTES = 16 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_munmap = _libc.munmap
_madvise = _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_move = _libc.memmove  # lets other threads run meanwhile
_move_holding_gil = ctypes.PyDLL(None).memmove
_move.argtypes = _move_holding_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move.restype = _move_holding_gil.restype = None


class _Map:
    """A shared, writable map of a whole memfd.

    It is no ``mmap.mmap``, which would keep a descriptor open for each map.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = 0
        address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(
                ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}"
            )
        self.address = int(address)
        self.nbytes = nbytes
        # a hint, which a system without huge pages refuses
        _madvise(address, nbytes, mmap.MADV_HUGEPAGE)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        if self.nbytes:
            munmap(self.address, self.nbytes)


class Segment:
    """Mapped shared memory; both sides refer to it by ``segment_id``."""

    def __init__(self, segment_id: int, fd: int, nbytes: int) -> None:
        self.segment_id = segment_id
        self.nbytes = nbytes
        memory = _Map(fd, nbytes)
        self.address = memory.address
        self.array = np.asarray(memory)  # keeps ``memory`` alive
        self.bytes = torch.from_numpy(self.array)


class OwnSegment(Segment):
    """A segment made here; once ``fd`` was sent to the peer it is closed, and the map stays."""

    def __init__(self, segment_id: int, fd: int, nbytes: int) -> None:
        self.fd = fd
        super().__init__(segment_id, fd, nbytes)

    @classmethod
    def create(cls, nbytes: int, segment_id: int = 0) -> OwnSegment:
        """A new segment of zeros that nobody can resize.

        Its pages are allocated when they are first written.
        """
        fd = os.memfd_create("pibroch", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(fd)
            raise
        return cls(segment_id, fd, nbytes)

    def close_fd(self) -> None:
        """Close the descriptor, if it is open."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close_fd()


class ForeignSegment(Segment):
    """A segment that a peer made."""

    @classmethod
    def open(cls, fd: int, nbytes: int, segment_id: int = 0) -> ForeignSegment:
        """Map the peer's segment of ``nbytes``; ``fd`` is closed in any case.

        Raises:
            ProtocolError: when it has another size, or could still be shrunk.
        """
        try:
            _check_sealed(fd, nbytes)
            return cls(segment_id, fd, nbytes)
        except OSError as error:
            raise _refused(str(error)) from error
        finally:
            os.close(fd)


def write(segment: Segment, offset: int, tensor: Tensor) -> None:
    """Copy ``tensor`` (on the CPU, of any strides) to ``offset``, in row-major order.

    Up to 64 KiB the copy keeps the GIL, as releasing it would take longer; up to 16 MiB one thread
    copies, as torch's other threads would go on spinning for longer than they helped; beyond that,
    torch copies with its threads.

    Raises:
        ValueError: when it does not fit.
    """
    nbytes = tensor.numel() * tensor.element_size()
    _check_fits(segment, offset, nbytes)
    if nbytes <= ONE_THREAD_BYTES and _is_plain(tensor):
        move = _move_holding_gil if nbytes <= HOLD_GIL_BYTES else _move
        move(segment.address + offset, tensor.data_ptr(), nbytes)
        return
    with torch.no_grad():
        segment.bytes[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class _ViewedArray(np.ndarray[Any, Any]):
    """An array below one view's storage, which alone refers to it: it dies with the storage."""

    __slots__ = ("when_dead",)
    when_dead: Callable[[], None]

    def __del__(self) -> None:
        self.when_dead()


def view(
    segment: Segment,
    offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    when_dead: Callable[[], None],
) -> Tensor:
    """A tensor on the bytes at ``offset`` (a multiple of 64), row-major, with a storage of its own.

    ``when_dead`` is called once, when nothing uses the storage any more: on any thread, also inside
    the garbage collector, and perhaps not at all for tensors that live until the interpreter ends.
    It must not raise, wait, or take a lock that is held while tensors can die. A tensor without
    elements still holds 64 bytes.

    Raises:
        ValueError: when the tensor would leave the segment.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    _check_fits(segment, offset, nbytes)
    array = np.ndarray.__new__(
        _ViewedArray,
        (nbytes or min(64, segment.nbytes - offset),),
        np.uint8,
        segment.array,
        offset,
    )
    array.when_dead = when_dead
    # not a view(): that would keep a second tensor alive
    return torch.frombuffer(array, dtype=dtype).resize_(tuple(shape))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_fits(segment: Segment, offset: int, nbytes: int) -> None:
    if not 0 <= offset <= segment.nbytes - max(nbytes, 1):
        raise ValueError(
            f"got {nbytes} bytes at {offset}, need a place within the segment's {segment.nbytes}"
            " bytes"
        )


def _check_sealed(fd: int, nbytes: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _refused("something that is not a file")
    if status.st_size != nbytes:
        raise _refused(f"{status.st_size} bytes, announced as {nbytes}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise _refused("one that can be resized")


def _refused(what: str) -> ProtocolError:
    return ProtocolError(
        f"a shared segment that cannot be used: {what}", "a sealed memfd of the announced size"
    )
