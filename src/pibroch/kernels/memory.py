"""What kernels say to the memory system: fetch this soon, and do not keep that in the caches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from pibroch.kernels.arrays import Stored
from pibroch.kernels.llvm import Builder, Context, Intrinsic, Kind, Signature, Value, Values

FLOATS_PER_LINE = 16
MAX_LINES = 16  # of a row are fetched; the hardware's own prefetcher follows longer ones
TO_SECOND_LEVEL = 2
TO_FIRST_LEVEL = 3
_ELEMENTS = (ir.FloatType(), ir.IntType(32), ir.IntType(16))
MAX_SHORT_DIM = 32  # of rows that are fetched into the first level


def hint(builder: Builder, level: int) -> tuple[Value, list[Value]]:
    """The function ``llvm.prefetch`` and its arguments after the address.

    They say that it is for reading, to which cache it fetches, and that it fetches data.
    """
    int32 = ir.IntType(32)
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    return function, [int32(0), int32(level), int32(1)]


def _prefetch(typingctx: Context, numbers: Kind, place: Kind) -> Intrinsic:
    """Typing and code of :func:`prefetch`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        target = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(8).as_pointer())
        function, flags = hint(builder, TO_FIRST_LEVEL)
        builder.call(function, [target, *flags])
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


def _prefetch_row(
    typingctx: Context, records: Kind, row: Kind, width: Kind, is_long: Kind
) -> Intrinsic:
    """Typing and code of :func:`prefetch_row`.

    One ``llvm.prefetch`` a cache line, and one for the last float.
    """

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        row_stride = cgutils.unpack_tuple(builder, array.strides)[0]
        byte = ir.IntType(8).as_pointer()
        int64 = ir.IntType(64)
        base = builder.gep(builder.bitcast(array.data, byte), [builder.mul(row_stride, args[1])])

        def fetch(level: int) -> None:
            function, flags = hint(builder, level)
            starts = [int64(line * FLOATS_PER_LINE) for line in range(MAX_LINES)]
            for start in starts:
                with builder.if_then(builder.icmp_signed(">", args[2], start)):
                    at = builder.gep(base, [builder.mul(start, int64(4))])
                    builder.call(function, [at, *flags])
            last = builder.sub(args[2], int64(1))
            builder.call(function, [builder.gep(base, [builder.mul(last, int64(4))]), *flags])

        with builder.if_else(args[3]) as (long, short):
            with long:
                fetch(TO_SECOND_LEVEL)
            with short:
                fetch(TO_FIRST_LEVEL)
        return context.get_dummy_value()

    return types.void(records, types.int64, types.int64, types.boolean), generate


def _stream_line(
    typingctx: Context, source: Kind, start: Kind, target: Kind, place: Kind
) -> Intrinsic:
    """Typing and code of :func:`stream_line`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        floats, words, halves = (ir.VectorType(kind, FLOATS_PER_LINE) for kind in _ELEMENTS)
        is_wide = signature.args[0].dtype == types.float32
        pointers = []
        for array, index, kind in ((0, 1, floats if is_wide else halves), (2, 3, floats)):
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            pointers.append(builder.bitcast(builder.gep(data, [args[index]]), kind.as_pointer()))
        line = builder.load(pointers[0])
        line.align = 4 if is_wide else 2
        if not is_wide:
            upper = ir.Constant(words, [16] * FLOATS_PER_LINE)
            line = builder.bitcast(builder.shl(builder.zext(line, words), upper), floats)
        stored = builder.store(line, pointers[1])
        stored.align = 64
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


def _pointed(typingctx: Context, like: Kind, address: Kind, size: Kind) -> Intrinsic:
    """Typing and code of :func:`numbers_at`."""
    array = types.Array(like.dtype, 1, "C")

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        made = context.make_array(array)(context, builder)
        size = context.get_abi_sizeof(context.get_data_type(like.dtype))
        itemsize = context.get_constant(types.intp, size)
        data = builder.inttoptr(args[1], made.data.type)
        populate_array(made, data, [args[2]], [itemsize], itemsize, None)
        return made._getvalue()

    return array(like, types.int64, types.int64), generate


def empty_rows(num_rows: int, width: int) -> NDArray[np.float32]:
    """Uninitialised float32 ``[num_rows, width]`` that begins with a cache line.

    No row of whole lines is split.
    """
    flat = np.empty(num_rows * width + FLOATS_PER_LINE, np.float32)
    first = -(flat.ctypes.data // flat.itemsize) % FLOATS_PER_LINE
    return flat[first : first + num_rows * width].reshape(num_rows, width)


def can_stream(target: NDArray[np.float32]) -> bool:
    """Whether each row ``[..., D]`` begins and ends with a cache line, for :func:`stream_line`."""
    whole_lines = target.shape[-1] % FLOATS_PER_LINE == 0 and target.ctypes.data % 64 == 0
    return whole_lines and target.flags.c_contiguous


def _no_hint(*place: object) -> None:
    """Stand-in when kernels run uncompiled (``NUMBA_DISABLE_JIT=1``)."""


def _copy_line(source: Stored, start: int, target: NDArray[np.float32], place: int) -> None:
    """Stand-in when kernels run uncompiled."""
    line = source.reshape(-1)[start : start + FLOATS_PER_LINE]
    line = line if line.dtype == np.float32 else (line.astype(np.uint32) << 16).view(np.float32)
    target.reshape(-1)[place : place + FLOATS_PER_LINE] = line


def _array_at(like: NDArray[Any], address: int, size: int) -> NDArray[Any]:
    """Stand-in when kernels run uncompiled."""
    memory = (ctypes.c_byte * (size * like.itemsize)).from_address(int(address))
    return np.ctypeslib.as_array(memory).view(like.dtype)


prefetch: Callable[..., None] = _no_hint
"""``prefetch(numbers, place)``.

Begin to fetch the line with ``numbers[place]`` of a contiguous array ``[N]``.
"""
prefetch_row: Callable[..., None] = _no_hint
"""``prefetch_row(records, row, width, is_long)``: begin to fetch the first floats of a row.

``records`` are ``[rows, W]``.

``is_long`` says that they may go to the second-level cache; one answer, ``dim > MAX_SHORT_DIM``,
for all a kernel reads. On the way to the first they queue for its few miss buffers: two cores of
Zen 4 update 53,000 random rows of 256 bytes in 1.7 ms this way, in 3.1 otherwise. Of short rows
they make nothing of the hint where most lines are of the same parity, as those of one feature's
gradients are, or where only some of the lines have it: 1.5 ms for an update of 64-byte rows that
takes 0.7.
"""
stream_line: Callable[..., None] = _copy_line
"""``stream_line(source, start, target, place)``: copy 16 floats past the caches.

Or as many bfloat16 as floats.

Indices are into the flat arrays, both contiguous; the target's place must begin a cache line
(:func:`can_stream`). For large outputs: an ordinary store first reads the line that it is about to
overwrite.
"""
numbers_at: Callable[..., NDArray[Any]] = _array_at
"""``numbers_at(like, address, size)``: an array ``[size]`` of the type of another, in its place.

For kernels over as many arrays as there are tables; who calls them holds the arrays.
"""
if not config.DISABLE_JIT:  # type: ignore[attr-defined]
    prefetch = intrinsic(_prefetch)
    prefetch_row = intrinsic(_prefetch_row)
    stream_line = intrinsic(_stream_line)
    numbers_at = intrinsic(_pointed)
