"""Messages of calls on references: creation, fetch, methods, backward passes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pibroch.rpc.references.messages import ValuePlace

Name = Annotated[str, msgspec.Meta(max_length=1024)]


class FunctionCall(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """Call a function by name."""

    function: Name


class MethodCall(msgspec.Struct, frozen=True, array_like=True, tag="method"):
    """Call a method of the value at ``place``.

    It is also sent as a request of its own, whose value is ``[args, kwargs]``.
    """

    place: ValuePlace
    method: Name


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    """Create a value and keep it; the message's value is ``[args, kwargs]``.

    Answered with the owner's incarnation when the value, or an error in its place, is set.

    Attributes:
        reference: the value's number.
        fork: number of the caller's fork.
        incarnation: of the caller.
        what: the call whose result is the value.
    """

    reference: int
    fork: int
    incarnation: int
    what: FunctionCall | MethodCall


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Fetch a value; answered once it is set."""

    place: ValuePlace


class Backward(msgspec.Struct, frozen=True, array_like=True, tag="rrefbackward"):
    """Run a distributed backward pass at the owner with the value as its root."""

    place: ValuePlace
    context: int
    retain_graph: bool
