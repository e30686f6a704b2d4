"""Sums of rows, held in registers: what pooling and the gradients of a row have in common.

A loop over columns for each row reads and writes the sum anew each time, and takes the columns that
fill no vector of the compiler's choice one by one. Here a block of columns stays in registers while
all its rows pass. Each column's sum is in the order of the rows, so blocks change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray

from pibroch.kernels.arrays import RowIds, Stored
from pibroch.kernels.llvm import Builder, Context, Intrinsic, Kind, Signature, Value, Values
from pibroch.kernels.memory import TO_FIRST_LEVEL, hint
from pibroch.kernels.narrow.naive import widened

_HAS_WIDE_REGISTERS = llvm.get_host_cpu_features().get("avx512f", False)
BLOCKS = (*((256,) if _HAS_WIDE_REGISTERS else ()), 128, 64, 32, 16, 8, 4, 2, 1)
"""Columns that are summed at once, the widest for as long as it fits.

They take half of the registers: 16 of 16 floats, or 16 of 8.
"""
LANES = 16
LINE_BYTES = 64
_BYTE = ir.IntType(8)
_HALF = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_FLOAT = ir.FloatType()


@dataclass(frozen=True, slots=True)
class _Sum:
    """Writes the code of one sum.

    Attributes:
        builder: of the code.
        kinds: numba's types of the arguments.
        numbers, rows, scale, out: the data of these arrays.
        order: likewise, or ``None``.
        stride: bytes of a row of ``numbers``.
        begin, end, dim, place: as in :func:`sum_rows`.
        ahead: likewise.
        last: the last place that has a row.
        is_scaled: whether the code is for sums with factors.
    """

    builder: Builder
    kinds: Sequence[Kind]
    numbers: Value
    rows: Value
    order: Value | None
    scale: Value
    out: Value
    stride: Value
    begin: Value
    end: Value
    dim: Value
    ahead: Value
    place: Value
    last: Value
    is_scaled: bool

    def write(self) -> None:
        """All blocks of columns, the widest first."""
        builder = self.builder
        column = cgutils.alloca_once(builder, _INT64)
        builder.store(_INT64(0), column)
        widest, *others = BLOCKS
        with cgutils.for_range(builder, builder.sdiv(self.dim, _INT64(widest))):
            self._block(widest, column)
        for width in others:
            left = builder.sub(self.dim, builder.load(column))
            with builder.if_then(builder.icmp_signed(">=", left, _INT64(width))):
                self._block(width, column)

    def _block(self, width: int, column_at: Value) -> None:
        builder = self.builder
        column = builder.load(column_at)
        first_sums = self._row(self.begin, column, width, None)
        before = builder.block
        loop = builder.append_basic_block("rows")
        done = builder.append_basic_block("summed")
        second = builder.add(self.begin, _INT64(1))
        builder.cbranch(builder.icmp_signed("<", second, self.end), loop, done)
        builder.position_at_end(loop)
        place = builder.phi(_INT64)
        sums = [builder.phi(each.type) for each in first_sums]
        added = self._row(place, column, width, sums)
        following = builder.add(place, _INT64(1))
        behind = builder.block
        builder.cbranch(builder.icmp_signed("<", following, self.end), loop, done)
        builder.position_at_end(done)
        totals = [builder.phi(each.type) for each in first_sums]
        firsts = [second, *first_sums, *first_sums]
        laters = [following, *added, *added]
        for phi, first, later in zip([place, *sums, *totals], firsts, laters, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, behind)
        target = builder.gep(self.out, [builder.add(self.place, column)])
        for number, total in enumerate(totals):
            at = builder.gep(target, [_INT64(number * LANES)])
            builder.store(total, builder.bitcast(at, total.type.as_pointer())).align = 4
        builder.store(builder.add(column, _INT64(width)), column_at)

    def _row(
        self, place: Value, column: Value, width: int, sums: Sequence[Value] | None
    ) -> list[Value]:
        """The block's columns of one row, added to ``sums``; fetches those of a later row."""
        builder = self.builder
        later = builder.add(place, self.ahead)
        is_there = builder.icmp_signed("<", later, self.last)
        self._fetch(self._address(builder.select(is_there, later, self.last), column)[0], width)
        address, position = self._address(place, column)
        kind = ir.VectorType(_FLOAT, min(width, LANES))
        factor = self._factor(position, kind) if self.is_scaled else None
        added = []
        for number in range(max(1, width // LANES)):
            row = self._vector(address, number, kind)
            # contracted as all kernels are, but in the order of the rows
            if factor is not None:
                row = builder.fmul(factor, row, flags=("contract",))
            if sums is not None:
                row = builder.fadd(sums[number], row, flags=("contract",))
            added.append(row)
        return added

    @property
    def _bytes_per_number(self) -> int:
        return 4 if self.kinds[0].dtype == types.float32 else 2

    def _address(self, place: Value, column: Value) -> tuple[Value, Value]:
        """Where a place's row has the column, and its position."""
        builder = self.builder
        position = place if self.order is None else self._integer(self.order, place)
        row = self._integer(self.rows, position)
        first = builder.mul(column, _INT64(self._bytes_per_number))
        start = builder.add(builder.mul(row, self.stride), first)
        return builder.gep(self.numbers, [start]), position

    def _integer(self, array: Value, place: Value) -> Value:
        number = self.builder.load(self.builder.gep(array, [place]))
        return number if number.type == _INT64 else self.builder.sext(number, _INT64)

    def _factor(self, position: Value, kind: ir.VectorType) -> Value:
        builder = self.builder
        factor = builder.load(builder.gep(self.scale, [position]))
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, _INT32(0))
        same = ir.Constant(ir.VectorType(_INT32, kind.count), [0] * kind.count)
        return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), same)

    def _vector(self, address: Value, number: int, kind: ir.VectorType) -> Value:
        builder = self.builder
        size = self._bytes_per_number
        stored = kind if size == 4 else ir.VectorType(_HALF, kind.count)
        at = builder.gep(address, [_INT64(number * LANES * size)])
        vector = builder.load(builder.bitcast(at, stored.as_pointer()))
        vector.align = size
        if size == 4:
            return vector
        words = ir.VectorType(_INT32, kind.count)
        upper = ir.Constant(words, [16] * kind.count)
        return builder.bitcast(builder.shl(builder.zext(vector, words), upper), kind)

    def _fetch(self, address: Value, width: int) -> None:
        builder = self.builder
        num_bytes = width * self._bytes_per_number
        function, flags = hint(builder, TO_FIRST_LEVEL)
        # a row may begin anywhere in a line
        for first in (*range(0, num_bytes, LINE_BYTES), num_bytes - 1):
            builder.call(function, [builder.gep(address, [_INT64(first)]), *flags])


def _sum_rows(
    typingctx: Context,
    numbers: Kind,
    rows: Kind,
    order: Kind,
    scale: Kind,
    first_row: Kind,
    begin: Kind,
    end: Kind,
    dim: Kind,
    ahead: Kind,
    out: Kind,
    place: Kind,
) -> Intrinsic:
    """Typing and code of :func:`sum_rows`."""
    arrays = [numbers, rows, scale, out] + ([] if order == types.none else [order])
    if any(each.layout != "C" for each in arrays):
        raise TypingError(f"arrays of layouts {[each.layout for each in arrays]}: need contiguous")

    def generate(context: Context, builder: Builder, signature: Signature, args: Values) -> Value:
        def array(number: int) -> Value:
            kind = signature.args[number]
            return context.make_array(kind)(context, builder, args[number])

        values, row_ids, factors, target = (array(number) for number in (0, 1, 3, 9))
        places = None if order == types.none else array(2)
        with_places = row_ids if places is None else places
        (num_places,) = cgutils.unpack_tuple(builder, with_places.shape)
        (num_factors,) = cgutils.unpack_tuple(builder, factors.shape)
        stride = cgutils.unpack_tuple(builder, values.strides)[0]
        data = builder.bitcast(values.data, _BYTE.as_pointer())
        first = builder.gep(data, [builder.mul(args[4], stride)])

        def write(is_scaled: bool) -> None:
            _Sum(
                builder,
                signature.args,
                first,
                row_ids.data,
                None if places is None else places.data,
                factors.data,
                target.data,
                stride,
                args[5],
                args[6],
                args[7],
                args[8],
                args[10],
                builder.sub(num_places, _INT64(1)),
                is_scaled,
            ).write()

        with builder.if_else(builder.icmp_signed(">", num_factors, _INT64(0))) as (scaled, plain):
            with scaled:
                write(True)
            with plain:
                write(False)
        return context.get_dummy_value()

    integers = (types.int64,) * 5
    return types.void(numbers, rows, order, scale, *integers, out, types.int64), generate


def _summed(
    numbers: Stored,
    rows: RowIds,
    order: NDArray[np.int32] | None,
    scale: NDArray[np.float32],
    first_row: int,
    begin: int,
    end: int,
    dim: int,
    ahead: int,
    out: NDArray[np.float32],
    place: int,
) -> None:
    """Stand-in when kernels run uncompiled (``NUMBA_DISABLE_JIT=1``)."""
    flat = numbers.reshape(-1)
    total = out.reshape(-1)[place : place + dim]
    for each in range(begin, end):
        position = each if order is None else order[each]
        first = (first_row + int(rows[position])) * numbers.shape[1]
        row = widened(flat[first : first + dim])
        if len(scale):
            row = scale[position] * row
        total[:] = row if each == begin else total + row


sum_rows: Callable[..., None] = _summed
"""``sum_rows(numbers, rows, order, scale, first_row, begin, end, dim, ahead, out, place)``.

Write the sum of the rows of the places ``begin`` to ``end``, of which there is one at least, to D
floats of ``out`` from ``place`` on, counted flat. Place i has the row ``first_row + rows[i]``, with
``order`` (else ``None``) ``rows[order[i]]``, times ``scale`` at the same index, which is empty for
ones. Rows are of ``numbers``, float32 or bfloat16 as uint16, D numbers from where the row begins;
they may go on in the next ones. The row ``ahead`` places later is fetched meanwhile.
"""
if not config.DISABLE_JIT:  # type: ignore[attr-defined]
    sum_rows = intrinsic(_sum_rows)
