"""Python values to bytes and tensors, and back: plain data, tensors, arrays, names, references; no code.

Lists, dicts, strings, bytes, numbers up to 64 bits, booleans and ``None`` are msgpack as such. Everything else is a msgpack
extension whose code is in ``Code``; what it contains is encoded in the same way, so a value nests to any (bounded) depth.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from pibroch.errors import NotAllowedError, ProtocolError, RpcError

Encoder = Callable[[Any], Any]
_Ext = msgspec.msgpack.Ext
_MAX_BIG_INT_BYTES = 1 << 16
_MAX_SCALAR_BYTES = 64


class Code:
    """What an extension holds."""

    TENSOR = 1  # index in the message's tensors
    TUPLE = 2  # [items]
    SET = 3
    FROZENSET = 4
    REFERENCE = 5  # index in the message's references
    NAMED = 6  # "module:qualname" of a function or class
    OBJECT = (
        7  # [name of the class, state]: dataclass, named tuple, enum member, or what says itself what of it travels
    )
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
    ORDERED = 22  # a dict that is not sorted by nature: [[key, value], ...] for keys that msgpack cannot hold


class Names(Protocol):
    """Gives callables names and finds them again (``callables.py``)."""

    def name(self, function: Any) -> str:
        """Its name."""

    def resolve(self, name: str) -> Any:
        """What it names."""


class Encoded(NamedTuple):
    """A value on its way out."""

    raw: msgspec.Raw
    tensors: list[torch.Tensor]
    references: list[Any]


class Codec:
    """Encodes and decodes values for one worker.

    Args:
        names: names of functions and classes.
        allow_pickle: objects without a data form travel as pickles, and pickles are opened.
        reference_type: the class of remote references, if there are any.
    """

    def __init__(self, names: Names, allow_pickle: bool = False, reference_type: type | None = None) -> None:
        self._names, self._allow_pickle = names, allow_pickle
        self._reference_type = reference_type

    def encode(self, value: object) -> Encoded:
        """A value's bytes, and the tensors and references that it contains.

        Raises:
            NotAllowedError: for a type that has no data form, or a function that cannot be named.
        """
        encoding = _Encoding(self)
        try:
            return Encoded(msgspec.Raw(_encode(encoding.plain(value))), encoding.tensors, encoding.references)
        except RecursionError as error:
            raise NotAllowedError("a value that is nested too deeply", "at most some hundred levels") from error

    def decode(self, raw: msgspec.Raw, tensors: Sequence[torch.Tensor] = (), references: Sequence[Any] = ()) -> Any:
        """The value.

        Raises:
            ProtocolError: for bytes that are no value.
            NotAllowedError: for a name that may not be used, or a pickle that is not wanted.
        """
        decoding = _Decoding(self, tensors, references)
        try:
            return decoding.value(raw)
        except RpcError:
            raise
        except RecursionError as error:
            raise ProtocolError("a value that is nested too deeply", "at most some hundred levels") from error
        except Exception as error:  # a constructor of the user's may raise anything
            raise ProtocolError(
                f"a value that cannot be read ({type(error).__name__}: {error})", "one of the known forms"
            ) from error


_encode = msgspec.msgpack.Encoder().encode
_FIRST_TENSORS = [_Ext(Code.TENSOR, _encode(index)) for index in range(64)]


class _Encoding:
    """One value on its way out."""

    __slots__ = ("codec", "references", "tensors")

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []

    def plain(self, value: Any) -> Any:
        """The same in msgpack's own types and extensions."""
        kind = type(value)
        if kind in _AS_IS:
            return value
        form = _FORMS.get(kind)
        if form is not None:
            return form(self, value)
        return self._other(value)

    def ext(self, code: int, value: Any) -> Any:
        return _Ext(code, _encode(value))

    def _other(self, value: Any) -> Any:
        """Types known by their bases."""
        codec = self.codec
        if codec._reference_type is not None and isinstance(value, codec._reference_type):
            self.references.append(value)
            return _Ext(Code.REFERENCE, _encode(len(self.references) - 1))
        if isinstance(value, torch.Tensor):
            return _tensor(self, value)
        if isinstance(value, np.generic):
            return _scalar(self, value)
        if isinstance(value, enum.Enum):
            state = self.plain(value.value) if isinstance(value, enum.Flag) else value.name
            return self.ext(Code.OBJECT, [codec._names.name(type(value)), state])
        if isinstance(value, type) or _is_function(value):
            try:
                return self.ext(Code.NAMED, codec._names.name(value))
            except NotAllowedError:
                if not codec._allow_pickle:
                    raise
                return _Ext(Code.PICKLE, pickle.dumps(value))  # such as a bound method
        if hasattr(type(value), "__rpc_state__"):  # says itself what of it travels
            return self.ext(Code.OBJECT, [codec._names.name(type(value)), self.plain(value.__rpc_state__())])
        if dataclasses.is_dataclass(value):
            fields = {field.name: self.plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return self.ext(Code.OBJECT, [codec._names.name(type(value)), fields])
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self.ext(Code.OBJECT, [codec._names.name(type(value)), [self.plain(item) for item in value]])
        for base in (dict, list, tuple, str, int, float):  # a subclass without state of its own travels as its base
            if isinstance(value, base) and type(value).__module__ in ("collections", "builtins"):
                plain: Any = base
                return self.plain(plain(value))
        if codec._allow_pickle:
            return _Ext(Code.PICKLE, pickle.dumps(value))
        raise NotAllowedError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__}",
            "plain data, tensors, arrays, dataclasses, enums, functions by name, or an RRef",
            "keep the object on its worker and send an RRef; or set allow_pickle on both sides",
        )


def _is_function(value: object) -> bool:
    return callable(value) and hasattr(value, "__qualname__") and not isinstance(value, torch.nn.Module)


def _tensor(encoding: _Encoding, tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.strided:
        return _sparse(encoding, tensor)
    index = len(encoding.tensors)
    encoding.tensors.append(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return encoding.ext(Code.PARAMETER, [index, tensor.requires_grad])
    return _FIRST_TENSORS[index] if index < len(_FIRST_TENSORS) else _Ext(Code.TENSOR, _encode(index))


def _sparse(encoding: _Encoding, tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.sparse_coo:
        raise NotAllowedError(f"a tensor of layout {tensor.layout}", "dense or COO", "send its parts, or .to_dense()")
    if (
        tensor.requires_grad
    ):  # its values stand for it in the graph; each place once, else it would get its gradient twice
        with torch.enable_grad():
            tensor = tensor.coalesce()
            encoding.tensors += [tensor.indices(), tensor.values()]
    else:
        encoding.tensors += [tensor._indices(), tensor._values()]
    count = len(encoding.tensors)
    return encoding.ext(Code.SPARSE, [count - 2, count - 1, list(tensor.shape), tensor.is_coalesced()])


def _dict(encoding: _Encoding, value: dict[Any, Any]) -> Any:
    if not value or all(type(key) is str for key in value):
        return {key: encoding.plain(item) for key, item in value.items()}
    return encoding.ext(Code.ORDERED, [[encoding.plain(key), encoding.plain(item)] for key, item in value.items()])


def _int(encoding: _Encoding, value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    num_bytes = value.bit_length() // 8 + 1
    if num_bytes > _MAX_BIG_INT_BYTES:
        raise NotAllowedError(f"an integer of {num_bytes:,} bytes", f"at most {_MAX_BIG_INT_BYTES:,}")
    return _Ext(Code.BIG_INT, value.to_bytes(num_bytes, "little", signed=True))


def _scalar(encoding: _Encoding, value: np.generic) -> Any:
    if value.dtype.hasobject or value.dtype.itemsize > _MAX_SCALAR_BYTES:
        got, need = f"a NumPy scalar of type {value.dtype}", f"a numeric one of at most {_MAX_SCALAR_BYTES} bytes"
        raise NotAllowedError(got, need)
    return encoding.ext(Code.SCALAR, [value.dtype.str, value.tobytes()])


def _array(encoding: _Encoding, value: np.ndarray[Any, Any]) -> Any:
    try:
        is_usable = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        tensor = torch.from_numpy(value if is_usable else np.array(value, order="C"))
    except TypeError as error:
        raise NotAllowedError(f"an array of type {value.dtype}", "a numeric one that torch knows") from error
    encoding.tensors.append(tensor)
    return _Ext(Code.ARRAY, _encode(len(encoding.tensors) - 1))


def _items(code: int) -> Callable[[_Encoding, Any], Any]:
    return lambda encoding, value: encoding.ext(code, [encoding.plain(item) for item in value])


_AS_IS = {type(None), bool, str, float, bytes}
_FORMS: dict[type, Callable[[_Encoding, Any], Any]] = {
    int: _int,
    torch.Tensor: _tensor,
    list: lambda encoding, value: [encoding.plain(item) for item in value],
    tuple: _items(Code.TUPLE),
    dict: _dict,
    set: _items(Code.SET),
    frozenset: _items(Code.FROZENSET),
    complex: lambda encoding, value: encoding.ext(Code.COMPLEX, [value.real, value.imag]),
    np.ndarray: _array,
    slice: lambda encoding, value: encoding.ext(
        Code.SLICE, [encoding.plain(x) for x in (value.start, value.stop, value.step)]
    ),
    range: lambda encoding, value: encoding.ext(Code.RANGE, [value.start, value.stop, value.step]),
    torch.dtype: lambda encoding, value: encoding.ext(Code.DTYPE, str(value).removeprefix("torch.")),
    torch.device: lambda encoding, value: encoding.ext(Code.DEVICE, str(value)),
    torch.Size: lambda encoding, value: encoding.ext(Code.SIZE, list(value)),
    bytearray: lambda encoding, value: _Ext(Code.BYTEARRAY, bytes(value)),
    type(Ellipsis): lambda encoding, value: _Ext(Code.ELLIPSIS, b""),
}


class _Decoding:
    """One value on its way in."""

    __slots__ = ("codec", "depth", "references", "tensors")

    def __init__(self, codec: Codec, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> None:
        self.codec, self.tensors, self.references = codec, tensors, references
        self.depth = 0

    def value(self, data: Any) -> Any:
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == Code.TENSOR:
            return self._tensor(msgspec.msgpack.decode(data))
        read = _READERS.get(code)
        if read is None:
            raise ProtocolError(f"a value of unknown form {code}", "one of the known forms")
        self.depth += 1
        if self.depth > 200:
            raise ProtocolError("a value that is nested too deeply", "at most 200 levels")
        try:
            return read(self, data)
        finally:
            self.depth -= 1

    def _tensor(self, index: Any) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self.tensors):
            raise ProtocolError(f"tensor {index!r}", f"one of the message's {len(self.tensors)}")
        return self.tensors[index]

    def big_int(self, data: memoryview) -> int:
        if len(data) > _MAX_BIG_INT_BYTES:
            raise ProtocolError(f"an integer of {len(data):,} bytes", f"at most {_MAX_BIG_INT_BYTES:,}")
        return int.from_bytes(data, "little", signed=True)

    def reference(self, data: memoryview) -> Any:
        index = self.value(data)
        if type(index) is not int or not 0 <= index < len(self.references):
            raise ProtocolError(f"remote reference {index!r}", f"one of the message's {len(self.references)}")
        return self.references[index]

    def object(self, data: memoryview) -> Any:
        """A dataclass, named tuple or enum member of an allowed module; its constructor runs."""
        name, state = self.value(data)
        cls = self.codec._names.resolve(name)
        if isinstance(cls, type) and issubclass(cls, enum.Enum) and isinstance(state, str):
            return cls[state]
        if isinstance(cls, type) and issubclass(cls, enum.Flag):
            return cls(state)
        if isinstance(cls, type) and hasattr(cls, "__rpc_made__"):
            return cls.__rpc_made__(state)
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and isinstance(state, dict):
            return _made(cls, state)
        if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields") and isinstance(state, list):
            return cls(*state)
        raise ProtocolError(f"data for {name}", "a dataclass, named tuple or enum")

    def scalar(self, data: memoryview) -> Any:
        name, raw = self.value(data)
        dtype = np.dtype(str(name))
        if dtype.hasobject or dtype.itemsize != len(raw) or dtype.itemsize > _MAX_SCALAR_BYTES:
            raise ProtocolError(f"a scalar of type {name}", "a numeric one")
        return np.frombuffer(raw, dtype)[0]

    def sparse(self, data: memoryview) -> torch.Tensor:
        indices, at, shape, coalesced = self.value(data)
        values = self._tensor(at)
        is_leaf = values.requires_grad and values.grad_fn is None  # outside of a distributed graph: so it was sent
        tensor = torch.sparse_coo_tensor(
            self._tensor(indices),
            values.detach() if is_leaf else values,
            shape,
            check_invariants=True,
            is_coalesced=bool(coalesced),
        )
        return tensor.requires_grad_() if is_leaf else tensor

    def parameter(self, data: memoryview) -> torch.Tensor:
        index, requires_grad = self.value(data)
        tensor = self._tensor(index)
        if tensor.grad_fn is not None:  # it belongs to a distributed graph, and stays there
            return tensor
        return torch.nn.Parameter(tensor.detach(), bool(requires_grad))

    def pickled(self, data: memoryview) -> Any:
        if not self.codec._allow_pickle:
            raise NotAllowedError("a pickle", "data", "set allow_pickle on both sides if you trust every worker")
        return pickle.Unpickler(io.BytesIO(bytes(data))).load()

    def complex(self, data: memoryview) -> complex:
        return complex(*self.value(data))

    def dtype(self, data: memoryview) -> torch.dtype:
        return _DTYPES[self.value(data)]

    def size(self, data: memoryview) -> torch.Size:
        sizes = self.value(data)
        math.prod(sizes)
        return torch.Size(sizes)


def _made(cls: type, state: dict[str, Any]) -> Any:
    """A dataclass: its constructor runs with the fields that it takes, the others are set afterwards."""
    fields = dataclasses.fields(cls)
    if state.keys() - {field.name for field in fields}:
        raise ProtocolError(f"fields {sorted(state)} for {cls.__qualname__}", "those of the dataclass")
    made = cls(**{field.name: state[field.name] for field in fields if field.init and field.name in state})
    for field in fields:
        if not field.init and field.name in state:
            object.__setattr__(made, field.name, state[field.name])
    return made


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_READERS: dict[int, Callable[[_Decoding, memoryview], Any]] = {
    Code.TUPLE: lambda decoding, data: tuple(decoding.value(data)),
    Code.SET: lambda decoding, data: set(decoding.value(data)),
    Code.FROZENSET: lambda decoding, data: frozenset(decoding.value(data)),
    Code.REFERENCE: _Decoding.reference,
    Code.NAMED: lambda decoding, data: decoding.codec._names.resolve(decoding.value(data)),
    Code.OBJECT: _Decoding.object,
    Code.BIG_INT: _Decoding.big_int,
    Code.COMPLEX: _Decoding.complex,
    Code.ARRAY: lambda decoding, data: decoding._tensor(decoding.value(data)).numpy(),
    Code.SCALAR: _Decoding.scalar,
    Code.SLICE: lambda decoding, data: slice(*decoding.value(data)),
    Code.RANGE: lambda decoding, data: range(*decoding.value(data)),
    Code.DTYPE: _Decoding.dtype,
    Code.DEVICE: lambda decoding, data: torch.device(decoding.value(data)),
    Code.SIZE: _Decoding.size,
    Code.BYTEARRAY: lambda decoding, data: bytearray(data),
    Code.PARAMETER: _Decoding.parameter,
    Code.SPARSE: _Decoding.sparse,
    Code.PICKLE: _Decoding.pickled,
    Code.ELLIPSIS: lambda decoding, data: ...,
    Code.ORDERED: lambda decoding, data: dict(decoding.value(data)),
}
