"""Python values to bytes and tensors, and back: data, tensors, arrays, names, references; no code.

Lists, dicts, strings, bytes, numbers up to 64 bits, booleans and ``None`` are msgpack as such.
Everything else is a msgpack extension whose code is in ``Code``; what it contains is encoded in the
same way, so a value nests to any (bounded) depth.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from pibroch.errors import NotAllowedError, ProtocolError, RpcError
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.forms import (
    MAX_BIG_INT_BYTES,
    MAX_SCALAR_BYTES,
    SCALAR_KINDS,
    Code,
    Decoding,
)
from pibroch.rpc.values.messages import encode
from pibroch.rpc.values.objects import state_of

__all__ = ["Code", "Codec"]

_Ext = msgspec.msgpack.Ext


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes values for one worker.

    Attributes:
        names: gives functions and classes their names.
        allow_pickle: whether objects without a data form travel as pickles, and pickles are opened.
        reference_type: the class of remote references, if there are any.
    """

    names: Callables
    allow_pickle: bool = False
    reference_type: type | None = None

    def encode(self, value: object) -> tuple[msgspec.Raw, list[torch.Tensor], list[object]]:
        """A value's bytes, and the tensors and references that it contains, to travel beside them.

        Raises:
            NotAllowedError: for a type that has no data form, or a function that cannot be named.
        """
        encoding = _Encoding(self)
        try:
            raw = msgspec.Raw(encode(encoding.plain(value)))
        except RecursionError as error:
            raise NotAllowedError(
                "a value that is nested too deeply", "at most some hundred levels"
            ) from error
        return raw, encoding.tensors, encoding.references

    def decode(
        self,
        raw: msgspec.Raw,
        tensors: Sequence[torch.Tensor] = (),
        references: Sequence[object] = (),
    ) -> object:
        """The value of ``raw`` and of the tensors and references that arrived beside it.

        Raises:
            ProtocolError: for bytes that hold no value.
            NotAllowedError: for a name that may not be used, or a pickle without ``allow_pickle``.
        """
        decoding = Decoding(self.names, self.allow_pickle, tensors, references)
        try:
            return decoding.value(raw)
        except RpcError:
            raise
        except RecursionError as error:
            raise ProtocolError(
                "a value that is nested too deeply", "at most some hundred levels"
            ) from error
        except Exception as error:  # a constructor of the user's may raise anything
            raise ProtocolError(
                f"a value that cannot be read ({type(error).__name__}: {error})",
                "one of the known forms",
            ) from error


_FIRST_TENSORS = [_Ext(Code.TENSOR, encode(index)) for index in range(64)]


@dataclasses.dataclass(slots=True, eq=False)
class _Encoding:
    """One value that is being encoded."""

    codec: Codec
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    references: list[object] = dataclasses.field(default_factory=list)

    def plain(self, value: object) -> object:
        """The value in msgpack's own types and extensions."""
        kind = type(value)
        if kind in _AS_IS:
            return value
        form = _FORMS.get(kind)
        if form is not None:
            return form(self, value)
        return self._other(value)

    def ext(self, code: int, value: object) -> object:
        return _Ext(code, encode(value))

    def _object(self, value: object, state: object) -> object:
        return self.ext(Code.OBJECT, [self.codec.names.name(type(value)), state])

    def _other(self, value: Any) -> object:
        """Encode a value whose type is recognised by its bases or attributes."""
        codec = self.codec
        if codec.reference_type is not None and isinstance(value, codec.reference_type):
            self.references.append(value)
            return _Ext(Code.REFERENCE, encode(len(self.references) - 1))
        if isinstance(value, np.generic):
            return _scalar(self, value)
        if isinstance(value, enum.Enum):
            return self._object(value, self.plain(state_of(value)))
        if isinstance(value, type) or _is_function(value):
            try:
                return self.ext(Code.NAMED, codec.names.name(value))
            except NotAllowedError:
                if not codec.allow_pickle:
                    raise
                return _Ext(Code.PICKLE, pickle.dumps(value))  # such as a bound method
        if hasattr(type(value), "__rpc_state__"):  # the class decides which state travels
            return self._object(value, self.plain(value.__rpc_state__()))
        if dataclasses.is_dataclass(value) or (
            isinstance(value, tuple) and hasattr(value, "_fields")
        ):
            return self._object(value, self.plain(state_of(value)))
        # a subclass of the standard library without state of its own travels as its base
        for base in (dict, list, tuple, str, int, float):
            if isinstance(value, base) and type(value).__module__ in ("collections", "builtins"):
                plain: Any = base
                return self.plain(plain(value))
        if codec.allow_pickle:
            return _Ext(Code.PICKLE, pickle.dumps(value))
        if isinstance(value, torch.Tensor):  # its bytes alone would arrive as something else
            raise NotAllowedError(
                f"a tensor of type {type(value).__module__}.{type(value).__qualname__}",
                "a torch.Tensor or torch.nn.Parameter itself",
                "send the plain tensors that it is made of",
            )
        raise NotAllowedError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__}",
            "plain data, tensors, arrays, dataclasses, enums, functions by name, or an RRef",
            "keep the object on its worker and send an RRef; or set allow_pickle on both sides",
        )


def _is_function(value: object) -> bool:
    return (
        callable(value)
        and hasattr(value, "__qualname__")
        and not isinstance(value, torch.nn.Module)
    )


def _tensor(encoding: _Encoding, tensor: torch.Tensor) -> object:
    if tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "meta"
        raise NotAllowedError(
            f"a {kind} tensor", "one of plain numbers", "send the plain tensors that it is made of"
        )
    if tensor.layout != torch.strided:
        return _sparse(encoding, tensor)
    index = len(encoding.tensors)
    encoding.tensors.append(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return encoding.ext(Code.PARAMETER, [index, tensor.requires_grad])
    return (
        _FIRST_TENSORS[index] if index < len(_FIRST_TENSORS) else _Ext(Code.TENSOR, encode(index))
    )


def _sparse(encoding: _Encoding, tensor: torch.Tensor) -> object:
    if tensor.layout != torch.sparse_coo:
        raise NotAllowedError(
            f"a tensor of layout {tensor.layout}", "dense or COO", "send its parts, or .to_dense()"
        )
    # its values represent it in the graph; coalesced, as each element must get its gradient once
    if tensor.requires_grad:
        with torch.enable_grad():
            tensor = tensor.coalesce()
            encoding.tensors += [tensor.indices(), tensor.values()]
    else:
        encoding.tensors += [tensor._indices(), tensor._values()]
    count = len(encoding.tensors)
    return encoding.ext(
        Code.SPARSE, [count - 2, count - 1, list(tensor.shape), tensor.is_coalesced()]
    )


def _dict(encoding: _Encoding, value: dict[Any, Any]) -> object:
    if not value or all(type(key) is str for key in value):
        return {key: encoding.plain(item) for key, item in value.items()}
    return encoding.ext(
        Code.ORDERED, [[encoding.plain(key), encoding.plain(item)] for key, item in value.items()]
    )


def _int(encoding: _Encoding, value: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    num_bytes = value.bit_length() // 8 + 1
    if num_bytes > MAX_BIG_INT_BYTES:
        raise NotAllowedError(
            f"an integer of {num_bytes:,} bytes", f"at most {MAX_BIG_INT_BYTES:,}"
        )
    return _Ext(Code.BIG_INT, value.to_bytes(num_bytes, "little", signed=True))


def _scalar(encoding: _Encoding, value: np.generic) -> object:
    if value.dtype.kind not in SCALAR_KINDS or value.dtype.itemsize > MAX_SCALAR_BYTES:
        got = f"a NumPy scalar of type {value.dtype}"
        need = f"a numeric one of at most {MAX_SCALAR_BYTES} bytes"
        raise NotAllowedError(got, need)
    return encoding.ext(Code.SCALAR, [value.dtype.str, value.tobytes()])


def _array(encoding: _Encoding, value: np.ndarray[Any, Any]) -> object:
    try:
        is_usable = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        tensor = torch.from_numpy(value if is_usable else np.array(value, order="C"))
    except TypeError as error:
        raise NotAllowedError(
            f"an array of type {value.dtype}", "a numeric one that torch knows"
        ) from error
    encoding.tensors.append(tensor)
    return _Ext(Code.ARRAY, encode(len(encoding.tensors) - 1))


def _items(code: int) -> Callable[[_Encoding, Any], Any]:
    return lambda encoding, value: encoding.ext(code, [encoding.plain(item) for item in value])


_AS_IS = {type(None), bool, str, float, bytes}
_FORMS: dict[type, Callable[[_Encoding, Any], Any]] = {
    int: _int,
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
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
    torch.dtype: lambda encoding, value: encoding.ext(
        Code.DTYPE, str(value).removeprefix("torch.")
    ),
    torch.device: lambda encoding, value: encoding.ext(Code.DEVICE, str(value)),
    torch.Size: lambda encoding, value: encoding.ext(Code.SIZE, list(value)),
    bytearray: lambda encoding, value: _Ext(Code.BYTEARRAY, bytes(value)),
    type(Ellipsis): lambda encoding, value: _Ext(Code.ELLIPSIS, b""),
}
