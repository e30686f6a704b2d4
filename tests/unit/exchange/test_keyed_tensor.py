import pytest
import torch

from pibroch.errors import ConfigError
from pibroch.exchange.keyed_tensor import KeyedTensor


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


def test_parts_may_lie_along_another_dimension():
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    below = KeyedTensor.from_tensor_list(["x", "y"], parts, 0, 0)
    assert (below.key_dim(), below.length_per_key(), below.offset_per_key()) == (
        0,
        [1, 2],
        [0, 1, 3],
    )
    for key, part in zip(["x", "y"], parts, strict=True):
        assert torch.equal(below[key], part) and torch.equal(below.to_dict()[key], part)
    assert below.to("cpu").key_dim() == 0
    turned, nothing = KeyedTensor.regroup([below], [["y", "x", "y"], []])
    assert turned[:, 0].tolist() == [3.0, 5.0, 1.0, 3.0, 5.0] and nothing.shape == (0, 2)


def test_the_last_of_a_name_counts():
    first = KeyedTensor(["x", "y"], [1, 1], torch.tensor([[1.0, 2.0]]))
    second = KeyedTensor(["y"], [2], torch.tensor([[3.0, 4.0]]))
    [group] = KeyedTensor.regroup([first, second], [["y", "x"]])
    assert group.tolist() == [[3.0, 4.0, 1.0]]
    twice = KeyedTensor(["x", "x"], [1, 1], torch.tensor([[1.0, 2.0]]))
    assert twice["x"].tolist() == twice.to_dict()["x"].tolist() == [[2.0]]


def test_what_is_printed():
    made = KeyedTensor(["x", "y"], [1, 2], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert (
        str(made)
        == """\
KeyedTensor({
    "x": [[1.0], [4.0]],
    "y": [[2.0, 3.0], [5.0, 6.0]]
})
"""
    )
    none = KeyedTensor([], [], torch.tensor([]))
    assert str(none) == "KeyedTensor()\n" and none.to_dict() == {}


def test_streams_reach_the_values(monkeypatch):
    reached = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *both: reached.append(both))
    made = KeyedTensor(["x"], [1], torch.ones(1, 1))
    made.record_stream("stream")
    assert reached == [(made.values(), "stream")]


def test_what_does_not_fit_is_refused():
    for key_dim in (1, 0, 2):
        with pytest.raises(ConfigError, match=rf"widths \[3\].*key_dim={key_dim}"):
            KeyedTensor(["a"], [3], torch.zeros(2, 4), key_dim)
    with pytest.raises(ConfigError, match="2 keys of widths"):
        KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(1, 2)] * 2, key_dim=0, cat_dim=1)
    one = KeyedTensor(["a"], [4], torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="key 'z'"):
        KeyedTensor.regroup([one], [["z"]])
    with pytest.raises(ConfigError, match="0 tensors"):
        KeyedTensor.regroup([], [["a"]])
    with pytest.raises(ConfigError, match=r"key dimensions \[0, 1\]"):
        KeyedTensor.regroup([one, KeyedTensor(["b"], [4], torch.zeros(4, 1), 0)], [["a"]])
    with pytest.raises(ConfigError, match="1 groups with 2 names"):
        KeyedTensor.regroup_as_dict([one], [["a"]], ["x", "y"])
