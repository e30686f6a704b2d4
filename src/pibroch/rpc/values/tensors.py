"""Tensors as bytes, without copies where they are large."""

from __future__ import annotations

import ctypes

import torch

from pibroch.errors import NotAllowedError, ProtocolError
from pibroch.rpc.values.messages import CODE_OF_DTYPE, DTYPE_OF_CODE, TensorInfo

MAX_SPREAD = 4  # a tensor with gaps between its rows may take so many times its elements' memory


def describe(tensor: torch.Tensor) -> TensorInfo:
    """The description of a tensor for its receiver.

    Raises:
        NotAllowedError: for a type that the wire format does not have.
    """
    code = CODE_OF_DTYPE.get(tensor.dtype)
    if code is None:
        raise NotAllowedError(
            f"a tensor of type {tensor.dtype}",
            f"one of {', '.join(map(str, CODE_OF_DTYPE))}",
            "convert it first",
        )
    if tensor.is_contiguous() or _is_expanded(tensor):
        return TensorInfo(code, tuple(tensor.shape), requires_grad=tensor.requires_grad)
    order, strides = layout_of(tensor)
    shape = tuple(tensor.shape[dim] for dim in order)
    return TensorInfo(code, shape, requires_grad=tensor.requires_grad, layout=(order, strides))


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a tensor from the largest stride to the smallest, and perhaps their strides.

    Strides are returned only where there are gaps between rows; gaps beyond ``MAX_SPREAD`` are not
    kept.

    >>> layout_of(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    ((0, 2, 3, 1), ())
    >>> layout_of(torch.empty(5, 4)[:, :2])
    ((0, 1), (4, 1))
    """
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    ordered = tuple(strides[dim] for dim in order)
    shape = tuple(tensor.shape[dim] for dim in order)
    return order, ordered if _has_gaps(shape, ordered) else ()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements occur more than once in memory; the receiver gets a copy of each."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _has_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements do not overlap and have gaps between them within ``MAX_SPREAD``.

    ``strides`` are sorted, the largest first.
    """
    extent = packed = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride < extent:
            return False
        extent = extent + (size - 1) * stride
        packed = packed * size
    return packed < extent <= MAX_SPREAD * packed


def in_memory_order(tensor: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The tensor with its dims in the order of ``info.shape``, as its bytes are sent."""
    return tensor if info.layout is None else tensor.detach().permute(info.layout[0])


def in_own_order(tensor: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """A received tensor with the layout that it had at the sender.

    It has the same memory, or is a copy with gaps between the rows.

    Raises:
        ProtocolError: for a layout that does not fit the shape.
    """
    if info.layout is None:
        return tensor
    order, strides = info.layout
    num_dims = len(info.shape)
    is_order = len(order) == num_dims and sorted(order) == [*range(num_dims)]
    if not is_order or (
        strides and (len(strides) != num_dims or not _has_gaps(info.shape, strides))
    ):
        got = (
            f"the layout {info.layout}"
            if len(order) + len(strides) <= 2 * num_dims
            else "the layout"
        )
        raise ProtocolError(
            f"{got} of a tensor of shape {info.shape}", "each dim once, little room"
        )
    if strides:
        tensor = torch.empty_strided(info.shape, strides, dtype=tensor.dtype).copy_(tensor)
    # ``.data``: not a view for autograd, which would forbid some work in place
    return tensor.permute([order.index(dim) for dim in range(num_dims)]).data


def bytes_with_room(info: TensorInfo) -> int:
    """Most memory that ``in_own_order`` takes for a copy with gaps between the rows.

    >>> bytes_with_room(TensorInfo(0, (5, 2), layout=((0, 1), (4, 1))))
    160
    """
    return MAX_SPREAD * info.num_bytes() if info.layout is not None and info.layout[1] else 0


def read_only_bytes(tensor: torch.Tensor, copy_below: int) -> bytes | memoryview:
    """A CPU tensor's bytes in row-major order.

    A copy when shorter than ``copy_below`` bytes, else a view that keeps the tensor alive.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < copy_below:
        return ctypes.string_at(tensor.data_ptr(), num_bytes)
    return bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of a contiguous CPU tensor's memory, which keeps the tensor alive."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def empty(info: TensorInfo) -> torch.Tensor:
    """An uninitialised tensor as described.

    Raises:
        ProtocolError: when there can be no such tensor.
    """
    try:
        return torch.empty(info.shape, dtype=DTYPE_OF_CODE[info.dtype])
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise ProtocolError(
            f"a tensor of shape {info.shape} ({error})", "one that fits into memory"
        ) from error


def cut(infos: list[TensorInfo], payload: bytearray | None) -> list[torch.Tensor]:
    """The tensors whose bytes follow each other in a short payload.

    A single tensor uses the payload's memory.

    Raises:
        ProtocolError: when they need more or fewer bytes than there are.
    """
    sizes = [info.num_bytes() for info in infos]
    num_bytes = len(payload) if payload is not None else 0
    if sum(sizes) != num_bytes:
        raise ProtocolError(
            f"{num_bytes:,} bytes of tensors", f"{sum(sizes):,}, as their shapes say"
        )
    tensors = []
    start = 0
    for info, size in zip(infos, sizes, strict=True):
        if not size or payload is None:
            tensors.append(empty(info))
            continue
        data = payload if size == num_bytes else payload[start : start + size]
        flat = torch.frombuffer(data, dtype=DTYPE_OF_CODE[info.dtype])
        tensors.append(flat if len(info.shape) == 1 else flat.resize_(info.shape))
        start += size
    return tensors
