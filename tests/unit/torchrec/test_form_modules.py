import pytest
import torch

from pibroch.errors import ConfigError, DataError
from pibroch.torchrec import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    DataType,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    KTRegroupAsDict,
    jt_is_equal,
    kjt_is_equal,
)


def ids(keys=("a", "b"), lengths=(1, 0, 1, 1), weights=None):
    return KeyedJaggedTensor(keys, torch.tensor([5, 6, 7]), weights, torch.tensor(lengths))


def test_ids_to_a_dictionary_and_back():
    parts = ComputeKJTToJTDict()(ids())
    assert parts["b"].lengths().tolist() == [1, 1] and parts["b"].values().tolist() == [6, 7]
    assert kjt_is_equal(ComputeJTDictToKJT()(parts), ids())


def test_regrouping_as_a_module():
    values = torch.arange(6.0).view(2, 3).requires_grad_()
    tensors = [KeyedTensor(["x", "y"], [1, 2], values)]
    groups, names = [["y", "x", "y"], ["x"]], ["first", "second"]
    out = KTRegroupAsDict(groups, names)(tensors)
    assert out["first"].tolist() == [[1.0, 2.0, 0.0, 1.0, 2.0], [4.0, 5.0, 3.0, 4.0, 5.0]]
    out["first"].sum().backward()
    assert values.grad.tolist() == [[1.0, 2.0, 2.0]] * 2
    cast = KTRegroupAsDict(groups, names, emb_dtype=DataType.BF16)(tensors)
    assert cast["second"].dtype == torch.bfloat16 and cast["second"].tolist() == [[0.0], [3.0]]
    assert not list(KTRegroupAsDict(groups, names).state_dict())
    with pytest.raises(ConfigError, match="2 groups with 1 names"):
        KTRegroupAsDict(groups, names[:1])
    with pytest.raises(ConfigError, match=r"DataType\.INT8; need a DataType among FP32"):
        KTRegroupAsDict(groups, names, DataType.INT8)


def test_equality():
    other = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([5, 6, 7]),
        offsets=torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32),
    )
    assert kjt_is_equal(ids(), other) and jt_is_equal(ids()["a"], other["a"])
    weighted = ids(weights=torch.ones(3))
    assert kjt_is_equal(weighted, ids(weights=torch.ones(3) + 1e-9))
    different = [
        ids(keys=("b", "a")),
        ids(keys=("a",)),
        ids(lengths=(0, 1, 1, 1)),
        weighted,
        "no ids",
        KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor([5, 6, 7]),
            None,
            torch.tensor([1, 0, 1, 1]),
            stride_per_key_per_rank=[[1], [3]],
        ),
    ]
    for one in different:
        assert not kjt_is_equal(ids(), one) and not kjt_is_equal(one, ids())
    assert not kjt_is_equal(weighted, ids(weights=torch.zeros(3)))
    part = JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))
    one, two = (JaggedTensor(torch.ones(n), offsets=torch.tensor([0, 1])) for n in (1, 2))
    assert not jt_is_equal(one, two)
    samples = [
        KeyedJaggedTensor(
            ["a", "b"], torch.arange(3), None, torch.tensor([1, 0, 2]), None, None, by_rank
        )
        for by_rank in ([[1], [2]], [[2], [1]])
    ]
    assert not kjt_is_equal(*samples)
    assert not jt_is_equal(part, None) and not jt_is_equal(part, ids()["b"])
    with pytest.raises(DataError, match="lengths of 4 values"):
        kjt_is_equal(ids(lengths=(1, 1, 1, 1)), ids(lengths=(1, 1, 1, 1)))
