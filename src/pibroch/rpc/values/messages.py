"""The metadata of a message: its body, its value, its tensors and where their bytes lie."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import torch

from pibroch.errors import ProtocolError

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
DTYPE_OF_CODE: dict[int, torch.dtype] = dict(enumerate(_DTYPES))
CODE_OF_DTYPE: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in DTYPE_OF_CODE.items()}
_MAX_DIMS = 64
MAX_TENSORS = 1 << 16
MAX_REFERENCES = 1 << 14


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One tensor of a message.

    Attributes:
        dtype: its code in ``DTYPE_OF_CODE``.
        shape: its sizes; the bytes are in row-major order.
        segment: the sender's shared segment that holds the bytes; ``None`` for the payload.
        offset: of the bytes in that segment.
        transfer: the bytes arrive in chunks under this number on bulk streams.
        requires_grad: as at the sender; ignored where a distributed graph takes over.
        device: index of the receiver's CUDA device that the tensor goes to; ``None`` for the CPU.
        layout: of a tensor that was not in row-major order: which dim of it each of ``shape`` is,
            and if there are gaps between its rows the stride of each, else an empty tuple.
    """

    dtype: int
    shape: tuple[int, ...]
    segment: int | None = None
    offset: int = 0
    transfer: int | None = None
    requires_grad: bool = False
    device: int | None = None
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def is_inline(self) -> bool:
        """Whether its bytes are in the payload."""
        return self.segment is None and self.transfer is None

    def num_bytes(self) -> int:
        """Length in bytes.

        Raises:
            ProtocolError: for a type or shape that does not exist.
        """
        if (
            self.dtype not in _ITEM_BYTES
            or len(self.shape) > _MAX_DIMS
            or any(size < 0 for size in self.shape)
        ):
            raise ProtocolError(
                f"a tensor of type {self.dtype} and shape {self.shape}",
                "a known type, sizes from 0 on",
            )
        num_bytes = math.prod(self.shape) * _ITEM_BYTES[self.dtype]
        if num_bytes >= 1 << 62 or (
            not num_bytes and math.prod(size or 1 for size in self.shape) >= 1 << 58
        ):
            raise ProtocolError(f"a tensor of shape {self.shape}", "one that fits into memory")
        return num_bytes


class Envelope(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A message's metadata.

    Attributes:
        body: a tagged struct; the tag says what the message is.
        value: a Python value as ``codec.py`` encodes it.
        tensors: the tensors that occur in it.
        context: the distributed autograd context that it belongs to.
        graph: its part of that context's graph.
        references: the remote references that occur in the value.
    """

    body: msgspec.Raw
    value: msgspec.Raw
    tensors: Annotated[list[TensorInfo], msgspec.Meta(max_length=MAX_TENSORS)] = []
    context: int | None = None
    graph: Any = None
    references: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_REFERENCES)] = []


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Run a function with the value ``[args, kwargs]``; the answer's value is what it returns."""

    function: str


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The value answers a request."""


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """The sender wants to leave together with all others.

    The answer comes when all have arrived, and says whether they may leave.

    Attributes:
        round: 0, 1, …: all workers go through the rounds together.
        num_started: calls that the sender has started so far; when no sum has changed within a
            round, no call is under way any more.
    """

    round: int
    num_started: int


class Absent(msgspec.Struct, frozen=True, array_like=True, tag="absent"):
    """Asks for the names of those that have not arrived, for the error of a worker that waited."""


_decoder = msgspec.msgpack.Decoder(Envelope)
encode = msgspec.msgpack.Encoder().encode


def decode_envelope(metadata: bytes) -> Envelope:
    """Metadata to an envelope.

    Raises:
        ProtocolError: when they hold no envelope.
    """
    try:
        return _decoder.decode(metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"metadata that cannot be read ({error})",
            f"an envelope as in the wire format, of at most {MAX_TENSORS:,} tensors and"
            f" {MAX_REFERENCES:,} references",
        ) from error
