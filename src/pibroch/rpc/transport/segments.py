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
import operator
import os
import stat
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

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


@dataclass(slots=True)
class BorrowedBytes:
    """The bytes that a view holds: ``nbytes`` at ``offset`` of ``segment``.

    ``when_dead`` is called when the view's storage dies; ``None`` once they were given back.
    """

    segment: Segment
    offset: int
    nbytes: int
    when_dead: Callable[[], None] | None


class _BorrowedArray(np.ndarray[Any, Any]):
    """An array below one view's storage, which alone refers to it: it dies with the storage."""

    __slots__ = ("borrowed", "key")
    key: int
    borrowed: BorrowedBytes
    all_borrowed: ClassVar[dict[int, BorrowedBytes]] = {}  # by the address of the storage

    def __del__(self) -> None:
        self.all_borrowed.pop(self.key, None)
        if self.borrowed.when_dead is not None:
            self.borrowed.when_dead()


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
    return _tensor_on(BorrowedBytes(segment, offset, nbytes, when_dead), dtype, shape)


def _tensor_on(borrowed: BorrowedBytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    segment = borrowed.segment
    nbytes = borrowed.nbytes or min(64, segment.nbytes - borrowed.offset)
    array = np.ndarray.__new__(_BorrowedArray, (nbytes,), np.uint8, segment.array, borrowed.offset)
    array.key = 0
    array.borrowed = borrowed
    # not a view(): that would keep a second tensor alive
    tensor = torch.frombuffer(array, dtype=dtype).resize_(tuple(shape))
    array.key = tensor.untyped_storage()._cdata
    array.all_borrowed[array.key] = borrowed
    return tensor


def borrowed_bytes_of(tensor: Tensor) -> BorrowedBytes | None:
    """The borrowed bytes of which ``tensor`` is the whole value, row-major, else ``None``.

    It was made by ``view``, or shares all memory of a tensor that was.
    """
    borrowed = (
        _BorrowedArray.all_borrowed.get(tensor.untyped_storage()._cdata)
        if tensor.layout is torch.strided
        else None
    )
    if (
        borrowed is None
        or not _is_plain(tensor)
        or tensor.numel() * tensor.element_size() != borrowed.nbytes
    ):
        return None
    return borrowed


def is_sole_owner(tensor: Tensor, references: int) -> bool:
    """Whether only the caller can still reach ``tensor``, made by ``view``, or its memory.

    Counted are references to the Python object, uses of the tensor below it (autograd's saved
    tensors, views, which keep their base, futures), uses of its storage (``detach()``, ``.data``,
    NumPy arrays) and weak references. The counts are compared with those of a fresh view, so that
    this holds for other versions of torch and Python; when in doubt the answer is no. Not counted
    are bare addresses (``data_ptr``) and torch's private weak handles. Claiming one reference too
    many would hide one that somebody else has.

    Args:
        tensor: a tensor that ``view`` returned.
        references: how many the caller's side holds: one for each variable, argument of a running
            function, or container. With ``def f(t): return is_sole_owner(t, references=2)``,
            ``x = view(...); f(x)`` is true.
    """
    counts = _counts(tensor)
    fresh = _fresh_counts()
    return bool(fresh) and counts[0] == fresh[0] + references and counts[1:] == fresh[1:]


def give_back(tensor: Tensor, references: int) -> BorrowedBytes | None:
    """Take the bytes from ``tensor``, if they are its whole value and nobody else can reach them.

    Then its ``when_dead`` is not called any more, and the caller decides about the bytes; it must
    not touch the tensor again. Otherwise ``None``, and nothing changed. ``references`` as in
    ``is_sole_owner``.
    """
    borrowed = borrowed_bytes_of(tensor)
    if borrowed is None or borrowed.when_dead is None or not is_sole_owner(tensor, references + 1):
        return None
    borrowed.when_dead = None
    return borrowed


_COUNTERS: tuple[Callable[[Any], int], ...] = (
    sys.getrefcount,
    Tensor._use_count,  # type: ignore[attr-defined]
    weakref.getweakrefcount,
    sys.getrefcount,
    weakref.getweakrefcount,
    torch._C._storage_Use_Count,
)


def _counts(tensor: Tensor) -> tuple[int, ...]:
    """All counts at one moment.

    ``map`` over functions in C lets no other Python thread run in between.
    """
    storage = tensor.untyped_storage()
    return tuple(
        map(operator.call, _COUNTERS, (tensor, tensor, tensor, storage, storage, storage._cdata))
    )


@cache
def _fresh_counts() -> tuple[int, ...]:
    """The counts of a view that one variable holds.

    Empty where an argument does not count as a reference, so that counts cannot be compared.
    """
    segment = OwnSegment.create(mmap.PAGESIZE)
    tensor = _tensor_on(BorrowedBytes(segment, 0, 4, None), torch.float32, (1,))
    fresh = _counts(tensor)
    as_argument = (lambda argument: _counts(argument))(tensor)
    return fresh if as_argument == (fresh[0] + 1, *fresh[1:]) else ()


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
