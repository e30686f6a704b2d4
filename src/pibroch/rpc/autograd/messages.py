"""Messages between workers about graphs and backward passes."""

from __future__ import annotations

import msgspec


class Graph(msgspec.Struct, frozen=True, array_like=True):
    """The part of a message that belongs to its context.

    Attributes:
        context: id of the context.
        creator: id and incarnation of the worker that opened it.
        message: unique number of the message in the graph.
        tensors: places of those of its tensors that require gradients.
    """

    context: int
    creator: tuple[int, int]
    message: int
    tensors: tuple[int, ...]


class Discover(msgspec.Struct, frozen=True, array_like=True, tag="discover"):
    """Go on with the search from these tensors, which the receiver has sent.

    Answered with the workers that take part, as ``[name, id]``.

    Attributes:
        context: id of the context.
        backward: number of the pass.
        root: id of the worker on which ``backward`` was called.
        edges: pairs of message and tensor.
        timeout_s: for the rest of the search, 0 for none.
    """

    context: int
    backward: int
    root: int
    edges: list[tuple[int, int]]
    timeout_s: float


class Start(msgspec.Struct, frozen=True, array_like=True, tag="backward"):
    """Run the receiver's part of a backward pass; answered when it is done."""

    context: int
    backward: int
    retain_graph: bool
    timeout_s: float


class GradientsMessage(msgspec.Struct, frozen=True, array_like=True, tag="gradients"):
    """Gradients of the tensors of a message that the receiver has sent.

    The value is a list with a gradient or ``None`` for each tensor.
    """

    context: int
    backward: int
    message: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A backward pass has failed; the receiver must not wait for it."""

    context: int
    backward: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A context is closed; the receiver drops it and passes this on to those that it reached."""

    context: int
