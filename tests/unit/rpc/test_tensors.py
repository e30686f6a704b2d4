"""How tensors lie in memory, there and back; and what a peer may say of it."""

import pytest
import torch

from pibroch.errors import ProtocolError
from pibroch.rpc.values.messages import TensorInfo
from pibroch.rpc.values.tensors import (
    bytes_of,
    describe,
    empty,
    in_memory_order,
    in_own_order,
    read_only_bytes,
)


def there_and_back(tensor):
    info = describe(tensor)
    arrived = empty(info)
    memory = bytes_of(arrived)
    data = read_only_bytes(in_memory_order(tensor, info), 1 << 20)
    if data:
        memory[:] = data
    return in_own_order(arrived, info)


SQUARE = torch.arange(25.0).reshape(5, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        SQUARE.t(),
        SQUARE.narrow(1, 2, 2),
        SQUARE.narrow(1, 2, 2).t(),
        SQUARE[::2, ::2],
        torch.rand(3, 1, 4).transpose(0, 2),
        torch.rand(3, 4, dtype=torch.complex64).t().conj(),
        torch.rand(4, 0).t(),
        torch.rand(()),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}, {tensor.stride()}",
)
def test_strides_survive(tensor):
    arrived = there_and_back(tensor)
    assert torch.equal(arrived, tensor) and not arrived._is_view()
    # of others it means nothing
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and tensor.numel()]
    assert [arrived.stride(dim) for dim in dims] == [tensor.stride(dim) for dim in dims]


@pytest.mark.parametrize(
    "tensor", [SQUARE[0].expand(4, 5), SQUARE[:1, :1].expand(3, 3)], ids=["rows", "all"]
)
def test_what_was_expanded_arrives_in_full(tensor):
    arrived = there_and_back(tensor)
    assert torch.equal(arrived, tensor) and arrived.is_contiguous()


def test_much_room_between_rows_is_not_kept():
    rows = torch.arange(10_000.0).reshape(100, 100)[::50]
    arrived = there_and_back(rows)
    assert torch.equal(arrived, rows) and arrived.is_contiguous()


@pytest.mark.parametrize(
    "layout",
    [
        ((0,), ()),
        ((0, 0), ()),
        ((0, 2), ()),
        ((0, -1), ()),
        ((0, 1), (1 << 40, 1)),  # much memory for few elements
        ((0, 1), (1, 1)),  # two elements in one place
        ((0, 1), (0, 1)),
        ((0, 1), (-4, 1)),
        ((0, 1), (4,)),
    ],
    ids=str,
)
def test_a_layout_that_fits_no_tensor_is_refused(layout):
    info = TensorInfo(0, (2, 3), layout=layout)
    with pytest.raises(ProtocolError, match="the layout"):
        in_own_order(empty(info), info)
