"""Tiles of small matrices, four rows by sixteen columns, held in vector registers.

Written as loops over arrays, such sums go through memory at each addition; as values of LLVM's
vector type they stay in one AVX-512 register each, two of AVX2 or four of NEON. A tile reads and
writes whole vectors: matrices are padded to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pibroch.kernels.arrays import Records
from pibroch.kernels.llvm import Builder, Context, Intrinsic, Kind, Signature, Value, Values

ROWS = 4  # independent sums: as many as a multiply-add takes cycles
LANES = 16

INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
FLOAT_BYTES = 4


class _MatrixInMemory:
    """Addresses in a two-dimensional float32 array."""

    def __init__(self, context: Context, builder: Builder, kind: Kind, value: Value) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.builder = builder
        self.strides = cgutils.unpack_tuple(builder, array.strides)
        self.base = builder.bitcast(array.data, ir.IntType(8).as_pointer())

    def at(self, row: Value, column: Value, kind: ir.Type) -> Value:
        build = self.builder
        offset = build.add(build.mul(row, self.strides[0]), build.mul(column, self.strides[1]))
        return build.bitcast(build.gep(self.base, [offset]), kind.as_pointer())

    def load(self, row: Value, column: Value, kind: ir.Type) -> Value:
        return self.builder.load(self.at(row, column, kind), align=FLOAT_BYTES)

    def store(self, value: Value, row: Value, column: Value) -> None:
        self.builder.store(value, self.at(row, column, value.type), align=FLOAT_BYTES)


def _shuffle(builder: Builder, first: Value, second: Value, mask: list[int]) -> Value:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, len(mask)), mask))


def _multiply_tile(
    typingctx: Context, out: Kind, row: Kind, column: Kind, left: Kind, right: Kind, depth: Kind
) -> Intrinsic:
    """Typing and code of `multiply_tile`; each sum runs over ``depth`` in order."""

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        out_, left_, right_ = (
            _MatrixInMemory(context, builder, signature.args[k], args[k]) for k in (0, 3, 4)
        )
        rows = [builder.add(args[1], INT64(r)) for r in range(ROWS)]
        sums = [cgutils.alloca_once_value(builder, VECTOR(None)) for _ in rows]
        with cgutils.for_range(builder, args[5]) as loop:
            lanes = right_.load(loop.index, args[2], VECTOR)
            for total, r in zip(sums, rows, strict=True):
                scalar = left_.load(r, loop.index, ir.FloatType())
                first = builder.insert_element(VECTOR(ir.Undefined), scalar, INT32(0))
                product = builder.fmul(
                    _shuffle(builder, first, first, [0] * LANES), lanes, flags=("contract",)
                )
                builder.store(
                    builder.fadd(builder.load(total), product, flags=("contract",)), total
                )
        for total, r in zip(sums, rows, strict=True):
            out_.store(builder.load(total), r, args[2])
        return context.get_dummy_value()

    return types.void(out, types.int64, types.int64, left, right, types.int64), generate


def _transpose_tile(
    typingctx: Context, out: Kind, source: Kind, row: Kind, column: Kind
) -> Intrinsic:
    """Typing and code of `transpose_tile`.

    Rows are interleaved within quarters, in two steps that x86 has as shuffles.
    """
    quarters = range(0, LANES, 4)

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        out_, source_ = (
            _MatrixInMemory(context, builder, signature.args[k], args[k]) for k in (0, 1)
        )
        a, b, c, d = (
            source_.load(builder.add(args[2], INT64(r)), args[3], VECTOR) for r in range(ROWS)
        )
        for half in (0, 2):
            mask = [
                k
                for q in quarters
                for k in (q + half, LANES + q + half, q + half + 1, LANES + q + half + 1)
            ]
            upper = _shuffle(builder, a, b, mask)
            lower = _shuffle(builder, c, d, mask)
            for odd in (0, 1):
                mask = [k + 2 * odd for q in quarters for k in (q, q + 1, LANES + q, LANES + q + 1)]
                # in each quarter q, column q + half + odd
                columns = _shuffle(builder, upper, lower, mask)
                for q in quarters:
                    four = _shuffle(builder, columns, columns, [q, q + 1, q + 2, q + 3])
                    out_.store(four, builder.add(args[3], INT64(q + half + odd)), args[2])
        return context.get_dummy_value()

    return types.void(out, source, types.int64, types.int64), generate


def _multiply_tile_plainly(
    out: Records, row: int, column: int, left: Records, right: Records, depth: int
) -> None:
    """``out[tile] = (left[:, :depth] @ right[:depth])[tile]``.

    The tile begins at ``(row, column)``.
    """
    rows = slice(row, row + ROWS)
    columns = slice(column, column + LANES)
    out[rows, columns] = left[rows, :depth] @ right[:depth, columns]


def _transpose_tile_plainly(out: Records, source: Records, row: int, column: int) -> None:
    """``out.T[tile] = source[tile]`` for the tile that begins at ``(row, column)``."""
    rows = slice(row, row + ROWS)
    columns = slice(column, column + LANES)
    out[columns, rows] = source[rows, columns].T


multiply_tile: Callable[..., None] = _multiply_tile_plainly
transpose_tile: Callable[..., None] = _transpose_tile_plainly
if not numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    multiply_tile = intrinsic(_multiply_tile)
    transpose_tile = intrinsic(_transpose_tile)
