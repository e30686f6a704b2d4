"""A hint to the memory system: fetch a record while earlier ones are worked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

FLOATS_PER_LINE = 16
MAX_LINES = 8  # the hardware's own prefetcher follows longer rows


def _prefetch_row(typingctx: Any, records: Any, row: Any) -> Any:
    """Typing and code of :func:`prefetch_row`: one ``llvm.prefetch`` a cache line of the record."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        row_stride, width = (
            cgutils.unpack_tuple(builder, array.strides)[0],
            cgutils.unpack_tuple(builder, array.shape)[1],
        )
        byte = ir.IntType(8).as_pointer()
        base = builder.gep(builder.bitcast(array.data, byte), [builder.mul(row_stride, args[1])])
        int32 = ir.IntType(32)
        hint = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32]), "llvm.prefetch.p0i8"
        )
        flags = [int32(0), int32(3), int32(1)]  # for reading, keep in all levels, data
        for line in range(MAX_LINES):
            inside = builder.icmp_signed(">", width, width.type(line * FLOATS_PER_LINE))
            with builder.if_then(inside):
                builder.call(hint, [builder.gep(base, [ir.IntType(64)(line * 64)]), *flags])
        return context.get_dummy_value()

    return types.void(records, types.int64), generate


def _no_hint(records: Any, row: Any) -> None:
    """Stand-in when kernels run uncompiled (``NUMBA_DISABLE_JIT=1``)."""


prefetch_row: Callable[..., None] = _no_hint if config.DISABLE_JIT else intrinsic(_prefetch_row)  # type: ignore[attr-defined]
