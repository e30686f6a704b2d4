"""Bits of numbers in one instruction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from pibroch.kernels.arrays import Stored
from pibroch.kernels.llvm import Builder, Context, Intrinsic, Kind, Signature, Value, Values

Number = np.float32 | np.uint16
"""Of an array in the type of its weights."""

_INT32 = ir.IntType(32)


def _lowest(typingctx: Context, mask: Kind) -> Intrinsic:
    """Typing and code of :func:`lowest`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.int64(types.int64), generate


def _lowest_of(mask: int) -> int:
    """Stand-in when kernels run uncompiled (``NUMBA_DISABLE_JIT=1``)."""
    number = int(mask)
    return (number & -number).bit_length() - 1 if number else 64


def _count(typingctx: Context, mask: Kind) -> Intrinsic:
    """Typing and code of :func:`count`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


def _count_of(mask: int) -> int:
    """Stand-in when kernels run uncompiled."""
    return (int(mask) & (1 << 64) - 1).bit_count()


def _widened(typingctx: Context, number: Kind) -> Intrinsic | None:
    """Typing and code of :func:`widened`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(
            builder.shl(builder.zext(args[0], _INT32), _INT32(16)), ir.FloatType()
        )

    return (types.float32(number), generate) if number in (types.float32, types.uint16) else None


def _widened_one(number: Number) -> np.float32:
    """Stand-in when kernels run uncompiled."""
    return (
        np.uint32(int(number) << 16).view(np.float32) if isinstance(number, np.uint16) else number
    )


def _half_widened(typingctx: Context, number: Kind) -> Intrinsic | None:
    """Typing and code of :func:`half_widened`.

    Shifted into a float32 of too small an exponent, then scaled by 2^112.
    """

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        if signature.args[0] == types.float32:
            return args[0]
        wide = builder.zext(args[0], _INT32)
        kind = ir.FloatType()
        small = builder.bitcast(builder.shl(builder.and_(wide, _INT32(0x7FFF)), _INT32(13)), kind)
        size = builder.bitcast(builder.fmul(small, ir.Constant(kind, 2.0**112)), _INT32)
        sign = builder.shl(builder.and_(wide, _INT32(0x8000)), _INT32(16))
        return builder.bitcast(builder.or_(size, sign), kind)

    return (types.float32(number), generate) if number in (types.float32, types.uint16) else None


def _half_widened_one(number: Number) -> np.float32:
    """Stand-in when kernels run uncompiled."""
    return np.float32(number.view(np.float16)) if isinstance(number, np.uint16) else number


def _cut_for(typingctx: Context, numbers: Kind, number: Kind) -> Intrinsic | None:
    """Typing and code of :func:`cut_for`."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        if signature.return_type == types.float32:
            return args[1]
        return builder.trunc(
            builder.lshr(builder.bitcast(args[1], _INT32), _INT32(16)), ir.IntType(16)
        )

    return (numbers.dtype(numbers, number), generate) if number == types.float32 else None


def _cut_for_one(numbers: Stored, number: np.float32) -> Number:
    """Stand-in when kernels run uncompiled."""
    return (
        number
        if numbers.dtype == np.float32
        else np.uint16(int(np.float32(number).view(np.uint32)) >> 16)
    )


lowest: Callable[..., int] = _lowest_of
"""``lowest(mask)``: the number of the lowest bit that is set in an int64, 64 when none is."""
count: Callable[..., int] = _count_of
"""``count(mask)``: how many bits are set in an int64."""
widened: Callable[..., np.float32] = _widened_one
"""``widened(number)``: a float32 as it is, the uint16 of a bfloat16 as float32."""
half_widened: Callable[..., np.float32] = _half_widened_one
"""``half_widened(number)``: a float32 as it is, the uint16 of a finite float16 as float32."""
cut_for: Callable[..., Number] = _cut_for_one
"""``cut_for(numbers, number)``: a float32 as an element of ``numbers``.

Uint16 elements take its upper half, which is exact for what was widened.
"""
if not config.DISABLE_JIT:  # type: ignore[attr-defined]
    lowest = intrinsic(_lowest)
    count = intrinsic(_count)
    widened = intrinsic(_widened)
    cut_for = intrinsic(_cut_for)
    half_widened = intrinsic(_half_widened)
