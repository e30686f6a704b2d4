"""The calls that concern references.

Making a value at its owner, fetching it, calling its methods, a backward pass.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pibroch.rpc.references import ValuePlace

Name = Annotated[str, msgspec.Meta(max_length=1024)]


class FunctionCall(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """Call a function by name."""

    function: Name


class MethodCall(msgspec.Struct, frozen=True, array_like=True, tag="method"):
    """Call a method of the value at ``place``.

    Also a request of its own, whose value is ``[args, kwargs]``.
    """

    place: ValuePlace
    method: Name


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    """Make a value and keep it; the message's value is ``[args, kwargs]``.

    Answered with the owner's incarnation when the value is there, or what making it raised.

    Attributes:
        reference: the value's number.
        fork: the caller's.
        incarnation: the caller's.
        what: makes the value.
    """

    reference: int
    fork: int
    incarnation: int
    what: FunctionCall | MethodCall


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Answered with the value, once it is there."""

    place: ValuePlace


class Backward(msgspec.Struct, frozen=True, array_like=True, tag="rrefbackward"):
    """Start a distributed backward pass at the owner, with the value as its root.

    Answered when it is over.
    """

    place: ValuePlace
    context: int
    retain_graph: bool
