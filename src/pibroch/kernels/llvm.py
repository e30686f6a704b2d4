"""Names for the types of functions that write LLVM code for numba.

An *intrinsic* is such a function: numba passes it the types of a call's arguments, and it returns
the call's signature and a function that writes the code. llvmlite publishes no types for these, and
numba few: LLVM itself checks the code.
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
"""numba's typing context while a call is typed, its target context while the code is written."""

Kind = Any
"""A type of numba's."""

Signature = Any
"""Types of a call's arguments and of what it returns."""

Intrinsic = tuple[Signature, Callable[[Context, Builder, Signature, Values], Value]]
