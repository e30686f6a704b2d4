import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pibroch.errors import DataError
from pibroch.torchrec import JaggedTensor


def test_a_part_of_a_longer_tensor_has_its_own_samples():
    part = JaggedTensor(torch.arange(6), offsets=torch.tensor([1, 3, 3, 6]))
    assert [each.tolist() for each in part.to_dense()] == [[1, 2], [], [3, 4, 5]]


@pytest.mark.parametrize("length", [None, 1, 2, 4])
def test_padding(length):
    ragged = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1]))
    rows = [[1.0, 2.0], [], [3.0]]
    width = length or 2
    want = [(row + [-1.0] * width)[:width] for row in rows]
    assert ragged.to_padded_dense(length, padding_value=-1.0).tolist() == want
    wide = JaggedTensor(
        torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]), offsets=torch.tensor([0, 2, 2, 3])
    )
    assert wide.to_padded_dense(length)[:, :, 0].tolist() == [
        [max(0.0, number) for number in row] for row in want
    ]


@given(
    st.lists(st.lists(st.integers(-3, 9), max_size=4), max_size=4),
    st.sampled_from([(), (2,), (2, 3)]),
    st.integers(0, 5),
    st.booleans(),
)
def test_dense_values_and_back(bags, shape, length, is_part):
    """Each number stands for a whole value, ``shape``; ``is_part``: more values around."""
    numbers = [number for bag in bags for number in bag]
    around = [5] * 3 if is_part else []
    filled = torch.tensor([*around, *numbers, *around], dtype=torch.int64)
    values = filled.view(-1, *[1] * len(shape)).expand(-1, *shape)
    ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0) + len(around)
    ragged = JaggedTensor(values, filled / 4, offsets=ends)

    assert [len(bag) for bag in ragged.to_dense()] == [len(bag) for bag in bags]
    padded = ragged.to_padded_dense(length, -4)
    assert padded.shape == (len(bags), length, *shape) and padded.dtype == torch.int64
    want = [(bag + [-4] * length)[:length] for bag in bags]
    assert padded.flatten(2).amax(2).tolist() == want if shape else padded.tolist() == want
    halves = ragged.to_padded_dense_weights(length, -1.0)
    assert halves.shape == (len(bags), length) and (halves * 4).tolist() == want

    if bags:
        again = JaggedTensor.from_dense(ragged.to_dense(), ragged.to_dense_weights())
        assert torch.equal(again.values(), values[len(around) : len(around) + len(numbers)])
        assert (again.weights() * 4).tolist() == numbers
        longest = ragged.to_padded_dense()
        shorter = JaggedTensor.from_dense_lengths(
            longest, again.lengths(), ragged.to_padded_dense_weights()
        )
        assert torch.equal(shorter.values(), again.values())
        assert torch.equal(shorter.weights(), again.weights())


def test_gradients_go_through_padding():
    values = torch.arange(4.0, requires_grad=True)
    ragged = JaggedTensor(values, lengths=torch.tensor([3, 0, 1]))
    (
        ragged.to_padded_dense(2, 7.0) * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ).sum().backward()
    assert values.grad.tolist() == [1.0, 2.0, 0.0, 5.0]


def test_without_weights_there_are_none():
    ragged = JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1]))
    assert ragged.to_dense_weights() is None and ragged.to_padded_dense_weights() is None


def test_without_samples():
    none = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert (none.values().dtype, none.lengths().dtype) == (torch.int64, torch.int32)
    assert none.lengths().tolist() == [] and none.offsets().tolist() == [0]
    assert none.to_dense() == none.to_dense_weights() == []
    assert none.to_padded_dense().shape == (0, 0) and none.to_padded_dense(3).shape == (0, 3)
    for lengths, offsets in ((torch.tensor([]), None), (None, torch.tensor([]))):
        assert JaggedTensor(torch.arange(0), None, lengths, offsets).offsets().tolist() == [0]


def test_moving():
    one = JaggedTensor(torch.ones(2), torch.ones(2), torch.tensor([2]))
    assert one.to("cpu") is one and one.to("meta").weights().device.type == "meta"


def test_what_is_printed():
    values = torch.tensor([[1, 2], [3, 4]])
    ragged = JaggedTensor(values, lengths=torch.tensor([0, 2]))
    assert str(ragged) == "JaggedTensor({\n    [[], [[1, 2], [3, 4]]]\n})\n"
    weighted = JaggedTensor(values, torch.tensor([0.5, 1.0]), torch.tensor([1, 1]))
    assert (
        str(weighted)
        == """\
JaggedTensor({
    "values": [[[1, 2]], [[3, 4]]],
    "weights": [[0.5], [1.0]]
})
"""
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="without lengths and offsets"):
        JaggedTensor(torch.zeros(3))
    for wrong in (torch.ones(3), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(DataError, match=r"lengths of type torch"):
            JaggedTensor(torch.zeros(3), lengths=wrong)
    with pytest.raises(DataError, match="a length of 3; need at most 2"):
        JaggedTensor.from_dense_lengths(torch.zeros(2, 2), torch.tensor([1, 3]))
    for offsets in ([0, 4], [0, 2, 1, 3]):
        ragged = JaggedTensor(torch.arange(3), offsets=torch.tensor(offsets))
        with pytest.raises(DataError, match=f"offsets 0 to {offsets[-1]} for 3 values"):
            ragged.to_padded_dense(2)
    whole = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    for fraction in (0.5, float("nan"), float("inf")):
        with pytest.raises(DataError, match=r"in torch\.int64; need a whole number"):
            whole.to_padded_dense(2, fraction)
