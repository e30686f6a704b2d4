"""The forms of values that msgpack does not have, and how each is read.

A small message of a peer must not become something large or slow here, or expose other memory. So
each reader checks types and lengths before it makes anything. A set or dict whose keys were chosen
to collide is refused too: it would take minutes, with the GIL held.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch

from pibroch.errors import NotAllowedError, ProtocolError
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.objects import restored

MAX_BIG_INT_BYTES = 1 << 16
MAX_SCALAR_BYTES = 64
SCALAR_KINDS = "?biufcmMSUV"
_MAX_DEPTH = 200
_MAX_NAME_LENGTH = 64  # of types and devices
_MAX_COLLISIONS = 64
_MAX_SPARSE_ELEMENTS = 1 << 62


class Code:
    """Codes of msgpack extensions, each with its content."""

    TENSOR = 1  # index in the message's tensors
    TUPLE = 2  # [items]
    SET = 3
    FROZENSET = 4
    REFERENCE = 5  # index in the message's references
    NAMED = 6  # "module:qualname" of a function or class
    # [name of the class, state]: dataclass, named tuple, enum member, or what has ``__rpc_state__``
    OBJECT = 7
    BIG_INT = 8  # two's complement, little endian
    COMPLEX = 9  # [real, imaginary]
    ARRAY = 10  # numpy: index in the message's tensors
    SCALAR = 11  # numpy: [dtype, bytes]
    SLICE = 12  # [start, stop, step]
    RANGE = 13
    DTYPE = 14  # "float32"
    DEVICE = 15  # "cpu"
    SIZE = 16  # torch.Size: [sizes]
    BYTEARRAY = 17
    PARAMETER = 18  # [index, requires_grad]
    SPARSE = 19  # coalesced or not COO: [indices, values, shape, coalesced]
    PICKLE = 20  # only when both sides allow it
    ELLIPSIS = 21
    ORDERED = 22  # a dict with keys that msgpack cannot hold: [[key, value], ...]


@dataclasses.dataclass(slots=True, eq=False)
class Decoding:
    """One value that is being decoded.

    Attributes:
        names: resolves names of functions and classes.
        allow_pickle: whether pickles are opened.
        tensors: the message's tensors.
        references: the message's references.
        depth: how many forms the one that is being read lies in.
    """

    names: Callables
    allow_pickle: bool
    tensors: Sequence[torch.Tensor]
    references: Sequence[object]
    depth: int = 0

    def value(self, data: Any) -> Any:
        """The value in these bytes."""
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> object:
        if code == Code.TENSOR:
            return self.tensor(msgspec.msgpack.decode(data))
        read = _READERS.get(code)
        if read is None:
            raise ProtocolError(f"a value of unknown form {code}", "one of the known forms")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ProtocolError("a value that is nested too deeply", f"at most {_MAX_DEPTH} levels")
        try:
            return read(self, data)
        finally:
            self.depth -= 1

    def tensor(self, index: object) -> torch.Tensor:
        """One of the message's tensors."""
        if type(index) is not int or not 0 <= index < len(self.tensors):
            raise ProtocolError(
                f"tensor {_short(index)}", f"one of the message's {len(self.tensors)}"
            )
        return self.tensors[index]

    def items(self, data: memoryview, *types: type) -> list[Any]:
        """A list; with ``types``, of exactly as many items, one of each type in order."""
        items = self.value(data)
        if type(items) is not list or (types and len(items) != len(types)):
            raise ProtocolError(
                _short(items), f"a list of {len(types)} items" if types else "a list"
            )
        for item, expected in zip(items, types, strict=False):
            if expected is not object and type(item) is not expected:
                raise ProtocolError(_short(item), f"a value of type {expected.__name__}")
        return items

    def text(self, data: memoryview) -> str:
        """A string of at most ``_MAX_NAME_LENGTH`` characters."""
        text = self.value(data)
        if type(text) is not str or len(text) > _MAX_NAME_LENGTH:
            raise ProtocolError(_short(text), f"a name of at most {_MAX_NAME_LENGTH} letters")
        return text


def _short(value: object) -> str:
    """A value for an error's message, or only its type where it may be long."""
    is_short = type(value) in (bool, int, float) or (
        isinstance(value, str) and len(value) <= _MAX_NAME_LENGTH
    )
    return repr(value) if is_short else f"a value of type {type(value).__name__}"


def _big_int(decoding: Decoding, data: memoryview) -> int:
    if len(data) > MAX_BIG_INT_BYTES:
        raise ProtocolError(f"an integer of {len(data):,} bytes", f"at most {MAX_BIG_INT_BYTES:,}")
    return int.from_bytes(data, "little", signed=True)


def _reference(decoding: Decoding, data: memoryview) -> object:
    index = decoding.value(data)
    if type(index) is not int or not 0 <= index < len(decoding.references):
        raise ProtocolError(
            f"remote reference {_short(index)}", f"one of the message's {len(decoding.references)}"
        )
    return decoding.references[index]


def _named(decoding: Decoding, data: memoryview) -> object:
    name = decoding.value(data)
    if type(name) is not str:
        raise ProtocolError(f"{_short(name)} as a name", "module:qualname")
    return decoding.names.resolve(name)


def _object(decoding: Decoding, data: memoryview) -> object:
    """A dataclass, named tuple or enum member of an allowed module, see :mod:`objects`.

    A class may define which state of its objects travels (``__rpc_state__``), and must then check
    the state that arrives (``__rpc_made__``).
    """
    name, state = decoding.items(data, str, object)
    cls = decoding.names.resolve(name)
    if isinstance(cls, type):
        if any("__rpc_made__" in vars(base) for base in cls.__mro__):
            return cast(Any, cls).__rpc_made__(state)
        value = restored(cls, state)
        if value is not None:
            return value
    raise ProtocolError(f"data for {name}", "a dataclass, named tuple or enum")


def _scalar(decoding: Decoding, data: memoryview) -> object:
    name, raw = decoding.items(data, str, bytes)
    if len(name) > _MAX_NAME_LENGTH:
        raise ProtocolError(f"a scalar whose type has a name of {len(name)} letters", "a short one")
    dtype = np.dtype(name)
    if dtype.kind not in SCALAR_KINDS or dtype.fields is not None or dtype.subdtype is not None:
        raise ProtocolError(f"a scalar of type {name}", "a numeric one")
    if dtype.itemsize != len(raw) or dtype.itemsize > MAX_SCALAR_BYTES:
        raise ProtocolError(
            f"a scalar of type {name} in {len(raw)} bytes", f"{dtype.itemsize}, at most 64"
        )
    return np.frombuffer(raw, dtype)[0]


def _sparse(decoding: Decoding, data: memoryview) -> torch.Tensor:
    indices_number, values_number, shape, coalesced = decoding.items(data, int, int, list, bool)
    num_elements = 1
    for size in shape:
        num_elements *= max(_size(size), 1)
        if num_elements > _MAX_SPARSE_ELEMENTS:
            raise ProtocolError(
                f"a sparse tensor with {len(shape)} sizes", "fewer than 2**62 elements"
            )
    # a copy: in shared memory the sender could still change the indices after they were checked
    indices = decoding.tensor(indices_number).clone()
    values = decoding.tensor(values_number)
    # as the sender's tensor was, outside of a distributed graph
    is_leaf = values.requires_grad and values.grad_fn is None
    tensor = torch.sparse_coo_tensor(
        indices,
        values.detach() if is_leaf else values,
        shape,
        check_invariants=True,
        is_coalesced=coalesced,
    )
    return tensor.requires_grad_() if is_leaf else tensor


def _size(size: object) -> int:
    if type(size) is not int or not -(1 << 63) <= size < 1 << 63:
        raise ProtocolError(f"{_short(size)} as a size", "an integer of 64 bits")
    return size


def _parameter(decoding: Decoding, data: memoryview) -> torch.Tensor:
    index, requires_grad = decoding.items(data, int, bool)
    tensor = decoding.tensor(index)
    if tensor.grad_fn is not None:  # part of a distributed graph, which a parameter would leave
        return tensor
    return torch.nn.Parameter(tensor.detach(), requires_grad)


def _pickled(decoding: Decoding, data: memoryview) -> object:
    if not decoding.allow_pickle:
        raise NotAllowedError(
            "a pickle", "data", "set allow_pickle on both sides if you trust every worker"
        )
    return pickle.Unpickler(io.BytesIO(bytes(data))).load()


def check_hashes(items: list[Any]) -> list[object]:
    """The items for a set or dict, if few of them have the same hash.

    Python hashes strings and bytes with a secret of the process, but not numbers and tuples of
    them, whose hashes a peer can choose.
    """
    if len(items) > _MAX_COLLISIONS:
        hashes = sorted(map(hash, items))
        same = 0
        for first, second in zip(hashes, hashes[_MAX_COLLISIONS:], strict=False):
            same += first == second
        if same:
            raise ProtocolError(
                f"{len(items):,} items of a set or dict, of which more than {_MAX_COLLISIONS} have"
                " one hash",
                "different ones",
                "send a list",
            )
    return items


def _ordered(decoding: Decoding, data: memoryview) -> dict[Any, Any]:
    pairs = decoding.items(data)
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise ProtocolError("items of a dict", "pairs of key and value")
    check_hashes([key for key, _ in pairs])
    return dict(pairs)


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_READERS: dict[int, Callable[[Decoding, memoryview], Any]] = {
    Code.TUPLE: lambda decoding, data: tuple(decoding.items(data)),
    Code.SET: lambda decoding, data: set(check_hashes(decoding.items(data))),
    Code.FROZENSET: lambda decoding, data: frozenset(check_hashes(decoding.items(data))),
    Code.REFERENCE: _reference,
    Code.NAMED: _named,
    Code.OBJECT: _object,
    Code.BIG_INT: _big_int,
    Code.COMPLEX: lambda decoding, data: complex(*decoding.items(data, float, float)),
    Code.ARRAY: lambda decoding, data: decoding.tensor(decoding.value(data)).numpy(),
    Code.SCALAR: _scalar,
    Code.SLICE: lambda decoding, data: slice(*decoding.items(data, object, object, object)),
    Code.RANGE: lambda decoding, data: range(*decoding.items(data, int, int, int)),
    Code.DTYPE: lambda decoding, data: _DTYPES[decoding.text(data)],
    Code.DEVICE: lambda decoding, data: torch.device(decoding.text(data)),
    Code.SIZE: lambda decoding, data: torch.Size([_size(size) for size in decoding.items(data)]),
    Code.BYTEARRAY: lambda decoding, data: bytearray(data),
    Code.PARAMETER: _parameter,
    Code.SPARSE: _sparse,
    Code.PICKLE: _pickled,
    Code.ELLIPSIS: lambda decoding, data: ...,
    Code.ORDERED: _ordered,
}
