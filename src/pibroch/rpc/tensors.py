"""Tensors as bytes, without copies where they are large."""

from __future__ import annotations

import ctypes

import torch

from pibroch.errors import NotAllowedError, ProtocolError
from pibroch.rpc.messages import CODE_OF_DTYPE, DTYPE_OF_CODE, TensorInfo


def describe(tensor: torch.Tensor) -> TensorInfo:
    """What the receiver needs to know of a tensor.

    Raises:
        NotAllowedError: for a type that the wire format does not know.
    """
    if tensor.is_nested:
        raise NotAllowedError("a nested tensor", "one with a shape", "send its parts: tensor.unbind()")
    code = CODE_OF_DTYPE.get(tensor.dtype)
    if code is None:
        raise NotAllowedError(
            f"a tensor of type {tensor.dtype}", f"one of {', '.join(map(str, CODE_OF_DTYPE))}", "convert it first"
        )
    return TensorInfo(code, tuple(tensor.shape), requires_grad=tensor.requires_grad)


def read_only_bytes(tensor: torch.Tensor, copy_below: int) -> bytes | memoryview:
    """A CPU tensor's bytes in row-major order: a copy when shorter than ``copy_below``, else a view that keeps it alive."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < copy_below:
        return ctypes.string_at(tensor.data_ptr(), num_bytes)
    return bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of a contiguous CPU tensor's memory, which keeps the tensor alive."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def empty(info: TensorInfo) -> tuple[torch.Tensor, memoryview]:
    """An uninitialised tensor as described, and its memory, which is valid as long as the tensor lives.

    Raises:
        ProtocolError: when there can be no such tensor.
    """
    try:
        tensor = torch.empty(info.shape, dtype=DTYPE_OF_CODE[info.dtype])
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise ProtocolError(f"a tensor of shape {info.shape} ({error})", "one that fits into memory") from error
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return tensor, memoryview(b"")
    return tensor, memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def cut(infos: list[TensorInfo], payload: bytearray | None) -> list[torch.Tensor]:
    """The tensors whose bytes follow each other in a short payload; a single one takes its memory over.

    Raises:
        ProtocolError: when they need more or less bytes than there are.
    """
    sizes = [info.num_bytes() for info in infos]
    num_bytes = len(payload) if payload is not None else 0
    if sum(sizes) != num_bytes:
        raise ProtocolError(f"{num_bytes:,} bytes of tensors", f"{sum(sizes):,}, as their shapes say")
    tensors, start = [], 0
    for info, size in zip(infos, sizes, strict=True):
        if not size or payload is None:
            tensors.append(empty(info)[0])
            continue
        data = payload if size == num_bytes else payload[start : start + size]
        flat = torch.frombuffer(data, dtype=DTYPE_OF_CODE[info.dtype])
        tensors.append(flat if len(info.shape) == 1 else flat.resize_(info.shape))
        start += size
    return tensors
