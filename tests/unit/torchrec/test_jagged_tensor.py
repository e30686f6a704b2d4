import pytest
import torch

from pibroch.errors import ConfigError, DataError
from pibroch.torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS, LENGTHS = ["a", "b"], torch.tensor([2, 0, 1, 1, 1, 0], dtype=torch.int32)


def ids(weights=None):
    return KeyedJaggedTensor(KEYS, torch.arange(5), weights, LENGTHS)


def test_offsets_and_lengths_give_the_same():
    other = KeyedJaggedTensor.from_offsets_sync(KEYS, torch.arange(5), ids().offsets())
    assert ids().offsets().tolist() == [0, 2, 2, 3, 4, 5, 5]
    assert other.lengths().tolist() == LENGTHS.tolist()
    assert KeyedJaggedTensor.from_lengths_sync(KEYS, torch.arange(5), LENGTHS).stride() == 3
    assert (ids().length_per_key(), ids().offset_per_key()) == ([3, 2], [0, 3, 5])


def test_parts_and_back():
    whole = ids(torch.arange(5) / 2)
    a, b = whole.to_dict().values()
    assert [each.tolist() for each in a.to_dense()] == [[0, 1], [], [2]]
    assert b.weights().tolist() == [1.5, 2.0]
    again = KeyedJaggedTensor.from_jt_dict({"a": a, "b": b})
    for name in ("values", "lengths", "weights"):
        assert torch.equal(getattr(again, name)(), getattr(whole, name)())
    turned = whole.permute([1, 0])
    assert turned.keys() == ["b", "a"] and turned.values().tolist() == [3, 4, 0, 1, 2]
    first, second = whole.split([1, 1])
    assert (first.keys(), second["b"].values().tolist()) == (["a"], [3, 4])
    assert KeyedJaggedTensor.concat([second, first]).keys() == ["b", "a"]
    assert whole.to("cpu") is whole
    with pytest.raises(KeyError, match="there are a, b"):
        whole["c"]


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


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="without lengths and offsets"):
        JaggedTensor(torch.zeros(3))
    with pytest.raises(DataError, match="5 lengths for 2 keys"):
        KeyedJaggedTensor(KEYS, torch.arange(5), lengths=LENGTHS[:5])
    with pytest.raises(DataError, match=r"weights\(\) of a KeyedJaggedTensor"):
        ids().weights()
    with pytest.raises(ConfigError, match="widths"):
        KeyedTensor(["a"], [3], torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="key 'z'"):
        KeyedTensor.regroup([KeyedTensor(["a"], [4], torch.zeros(2, 4))], [["z"]])


def test_keyed_tensors_of_a_list_regroup():
    parts = [torch.full((2, width), float(width)) for width in (1, 3)]
    made = KeyedTensor.from_tensor_list(["x", "y"], parts)
    other = KeyedTensor(["z"], [1], torch.zeros(2, 1)).to("cpu")
    groups = KeyedTensor.regroup_as_dict([made, other], [["y", "z"], ["x"]], ["first", "second"])
    assert (
        groups["first"].tolist() == [[3.0, 3.0, 3.0, 0.0]] * 2
        and groups["second"].tolist() == [[1.0]] * 2
    )
    assert made.key_dim() == 1 and made.device() == torch.device("cpu")
    with pytest.raises(KeyError, match="there are x, y"):
        made["z"]
