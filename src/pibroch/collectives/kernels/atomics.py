"""What kernels need to talk to other processes through shared memory.

Ordered loads and stores, copies, a place to sleep.

Places are bare addresses (int64): memory of another process has no array until somebody maps it,
and kernels that copy to a few dozen of such places a call have no use for one. Callers answer for
the addresses.

A store with release order makes everything written before it visible to whoever loads its value
with acquire order. Two processes that each write one word and then read the other's need more, the
full barrier in :func:`add`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from pibroch.kernels.llvm import Builder, Context, Intrinsic, Kind, Signature, Value, Values

FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""The number of Linux's system call, ``None`` where it is not known.

Then nothing of this module that sleeps may be used.
"""
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}.get(
    platform.machine()
)
_WAIT = 0
_WAKE = 1
_MONOTONIC = 1
LINE_BYTES = 64
_INT64 = ir.IntType(64)
_INT32 = ir.IntType(32)


def _pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, _INT64.as_pointer())


def _load(typingctx: Context, address: Kind) -> Intrinsic:
    """Typing and code of :func:`load`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


def _store(typingctx: Context, address: Kind, value: Kind) -> Intrinsic:
    """Typing and code of :func:`store`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _add(typingctx: Context, address: Kind, value: Kind) -> Intrinsic:
    """Typing and code of :func:`add`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _copy(typingctx: Context, target: Kind, source: Kind, nbytes: Kind) -> Intrinsic:
    """Typing and code of :func:`copy`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(args[i], byte) for i in (0, 1))
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _stream_lines(typingctx: Context, target: Kind, source: Kind) -> Intrinsic:
    """Typing and code of :func:`stream_line_at`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        line = ir.VectorType(_INT64, LINE_BYTES // 8).as_pointer()
        loaded = builder.load(builder.inttoptr(args[1], line))
        loaded.align = 1
        stored = builder.store(loaded, builder.inttoptr(args[0], line))
        stored.align = LINE_BYTES
        stored.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _fence(typingctx: Context) -> Intrinsic:
    """Typing and code of :func:`fence`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _pause(typingctx: Context) -> Intrinsic:
    """Typing and code of :func:`pause`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        if _PAUSE is not None:
            name, numbers = _PAUSE
            kind = ir.FunctionType(ir.VoidType(), [_INT32] * len(numbers))
            builder.call(
                cgutils.get_or_insert_function(builder.module, kind, name),
                [_INT32(each) for each in numbers],
            )
        return context.get_dummy_value()

    return types.void(), generate


def _give_way(typingctx: Context) -> Intrinsic:
    """Typing and code of :func:`give_way`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INT32, []), "sched_yield"
        )
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


def _nanoseconds(typingctx: Context) -> Intrinsic:
    """Typing and code of :func:`nanoseconds`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        room = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))
        kind = ir.FunctionType(_INT32, [_INT32, room.type])
        builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "clock_gettime"),
            [_INT32(_MONOTONIC), room],
        )
        seconds, rest = (
            builder.load(builder.gep(room, [_INT32(0), _INT32(place)])) for place in (0, 1)
        )
        return builder.add(builder.mul(seconds, _INT64(1_000_000_000)), rest)

    return types.int64(), generate


def _futex(builder: Builder, address: Value, operation: int, value: Value, time: Value) -> None:
    kind = ir.FunctionType(_INT64, [_INT64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    builder.call(
        function,
        [_INT64(FUTEX_CALL or 0), address, _INT64(operation), value, time, _INT64(0), _INT64(0)],
    )


def _sleep_on(typingctx: Context, address: Kind, value: Kind, microseconds: Kind) -> Intrinsic:
    """Typing and code of :func:`sleep_on`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        room = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))
        million = _INT64(1_000_000)
        nanoseconds = builder.mul(builder.urem(args[2], million), _INT64(1000))
        for place, number in enumerate((builder.udiv(args[2], million), nanoseconds)):
            builder.store(number, builder.gep(room, [_INT32(0), _INT32(place)]))
        expected = builder.and_(args[1], _INT64(0xFFFFFFFF))
        _futex(builder, args[0], _WAIT, expected, builder.ptrtoint(room, _INT64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _wake(typingctx: Context, address: Kind) -> Intrinsic:
    """Typing and code of :func:`wake`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        _futex(builder, args[0], _WAKE, _INT64(0x7FFFFFFF), _INT64(0))
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _load_one(address: int) -> int:
    """Stand-in when kernels run uncompiled (``NUMBA_DISABLE_JIT=1``).

    On x86 loads and stores of words are in order.
    """
    return ctypes.c_int64.from_address(int(address)).value


def _store_one(address: int, value: int) -> None:
    """Stand-in when kernels run uncompiled."""
    ctypes.c_int64.from_address(int(address)).value = int(value)


def _add_one(address: int, value: int) -> int:
    """Stand-in when kernels run uncompiled, for one writer at a time."""
    word = ctypes.c_int64.from_address(int(address))
    before = word.value
    word.value = before + int(value)
    return before


def _copy_one(target: int, source: int, nbytes: int) -> None:
    """Stand-in when kernels run uncompiled."""
    ctypes.memmove(int(target), int(source), int(nbytes))


def _copy_line(target: int, source: int) -> None:
    """Stand-in when kernels run uncompiled."""
    ctypes.memmove(int(target), int(source), LINE_BYTES)


def _nothing(*_: int) -> None:
    """Stand-in when kernels run uncompiled: nobody sleeps, so nobody need be woken."""


def _give_way_once(*_: int) -> None:
    """Stand-in when kernels run uncompiled."""
    os.sched_yield()


load: Callable[..., int] = _load_one
"""``load(address)``: an int64, with acquire order."""
store: Callable[..., None] = _store_one
"""``store(address, value)``: an int64, with release order."""
add: Callable[..., int] = _add_one
"""``add(address, value)``: to an int64, in one piece, as a full barrier.

Returns what was there before.
"""
copy: Callable[..., None] = _copy_one
"""``copy(target, source, nbytes)``: between memory that does not overlap."""
stream_line_at: Callable[..., None] = _copy_line
"""``stream_line_at(target, source)``: copy 64 bytes past the caches to where a cache line begins.

:func:`fence` orders them.
"""
fence: Callable[..., None] = _nothing
"""``fence()``: a full barrier, for streamed lines, too."""
pause: Callable[..., None] = _nothing
"""``pause()``: say to the core that this is a loop that waits."""
give_way: Callable[..., None] = _give_way_once
"""``give_way()``: let another thread have this core, if one wants it."""
nanoseconds: Callable[..., int] = time.monotonic_ns
"""``nanoseconds()``: of a clock that never goes back."""
sleep_on: Callable[..., None] = _give_way_once
"""``sleep_on(address, value, microseconds)``: sleep until somebody wakes this address.

It sleeps only if the int64 there still is ``value``.

Returns at once if it is not, after the time at the latest, and now and then for no reason.
Little-endian machines alone.
"""
wake: Callable[..., None] = _nothing
"""``wake(address)``: all that sleep there, in any process that maps this memory."""
if not config.DISABLE_JIT:  # type: ignore[attr-defined]
    load = intrinsic(_load)
    store = intrinsic(_store)
    add = intrinsic(_add)
    copy = intrinsic(_copy)
    stream_line_at = intrinsic(_stream_lines)
    fence = intrinsic(_fence)
    pause = intrinsic(_pause)
    give_way = intrinsic(_give_way)
    nanoseconds = intrinsic(_nanoseconds)
    sleep_on = intrinsic(_sleep_on)
    wake = intrinsic(_wake)
