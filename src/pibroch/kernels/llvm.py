"""What functions that write LLVM code for numba take and give, by the names that signatures use.

An intrinsic is such a function: numba tells it the types of a call's arguments, and it answers with
the call's signature and a ``generate`` that writes the code. Of these types llvmlite publishes
none, and numba few: LLVM itself checks what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir

Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value
"""A value of the code, known when it runs: an argument, or what an instruction computes."""

Values = Sequence[Value]
Context = Any
"""Of numba: of the types when a call is typed, of the target when its code is written."""

Kind = Any
"""A type of numba's."""

Signature = Any
"""Types of a call's arguments and of what it returns."""

Intrinsic = tuple[Signature, Callable[[Context, Builder, Signature, Values], Value]]
