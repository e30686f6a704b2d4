import pytest
import torch

from pibroch.errors import ConfigError, DataError
from pibroch.torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS = ["a", "b"]
LENGTHS = torch.tensor([2, 0, 1, 1, 1, 0], dtype=torch.int32)


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


def bags(ragged):
    """Keys, each with its bags and their weights."""
    parts = ragged.split([1] * len(ragged.keys()))
    listed = []
    for key, part in zip(ragged.keys(), parts, strict=True):
        weights = part.weights_or_none()
        bags_of_key = [bag.tolist() for bag in part.to_dense()]
        listed.append((key, bags_of_key, None if weights is None else weights.tolist()))
    return listed


PLACES = [[1, 0, 1], [0, 0], [1], [], [0, 1], [1, 1, 1, 0]]


@pytest.mark.parametrize("weights", [None, torch.arange(5) / 2])
@pytest.mark.parametrize("places", PLACES)
def test_keys_may_be_taken_in_any_order_and_number(places, weights):
    whole = ids(weights)
    single = bags(whole)
    taken = whole.permute(places, torch.tensor(places, dtype=torch.int32))
    assert taken.stride() == 3
    assert taken.lengths().dtype == whole.lengths().dtype
    assert (taken.weights_or_none() is None) == (weights is None)
    assert bags(taken) == [single[place] for place in places]


@pytest.mark.parametrize("segments", [[1, 0, 1], [0, 2], [2, 0], [0], [1], [0, 1, 0, 1, 0]])
def test_segments_may_be_empty(segments):
    parts = ids(torch.ones(5)).split(segments)
    assert [len(part.keys()) for part in parts] == segments
    assert {part.stride() for part in parts} == {3}
    assert [bag for part in parts for bag in bags(part)] == bags(ids(torch.ones(5)))[
        : sum(segments)
    ]
    again = KeyedJaggedTensor.concat(parts)
    assert again.keys() == KEYS[: sum(segments)] and again.stride() == 3


def test_joining_keeps_what_repeats():
    twice = KeyedJaggedTensor.concat([ids(), ids()])
    assert twice.keys() == KEYS * 2
    assert twice.values().tolist() == [*range(5), *range(5)]
    assert twice.length_per_key() == [3, 2, 3, 2]
    assert bags(twice)[2:] == bags(ids())
    for lookup in (twice.to_dict, lambda: twice["a"]):
        with pytest.raises(DataError, match="'a', which is there 2 times"):
            lookup()
    assert twice.permute([3])["b"].values().tolist() == [3, 4]


def test_batches_without_samples_are_batches():
    none = KeyedJaggedTensor(KEYS, torch.arange(0), lengths=torch.arange(0))
    assert (none.stride(), none.length_per_key(), none["b"].to_dense()) == (0, [0, 0], [])
    assert none.permute([1, 1]).keys() == ["b", "b"]
    nobody = KeyedJaggedTensor([], torch.arange(0), lengths=torch.arange(0), stride=4)
    assert (nobody.stride(), nobody.to_dict(), nobody.offset_per_key()) == (4, {}, [0])


def test_parts_that_do_not_fit_are_refused():
    plain = JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1]))
    weighted = JaggedTensor(torch.tensor([3]), torch.tensor([9.0]), torch.tensor([1]))
    longer = JaggedTensor(torch.tensor([3]), lengths=torch.tensor([1, 0]))
    for parts in ({"a": plain, "b": weighted}, {"b": weighted, "a": plain}):
        with pytest.raises(DataError, match=r"some have weights and some do not \(a\)"):
            KeyedJaggedTensor.from_jt_dict(parts)
    with pytest.raises(DataError, match="some have weights"):
        KeyedJaggedTensor.concat([ids(), ids(torch.ones(5))])
    with pytest.raises(DataError, match=r"of \[1, 2\] samples"):
        KeyedJaggedTensor.from_jt_dict({"a": plain, "b": longer})
    for join in (KeyedJaggedTensor.from_jt_dict, KeyedJaggedTensor.concat):
        with pytest.raises(DataError, match="at least one part"):
            join({})
    for places in ([2], [-1]):
        with pytest.raises(DataError, match=f"key {places[0]} of 2"):
            ids().permute(places)
    for segments in ([3], [1, 2], [-1, 2]):
        with pytest.raises(DataError, match="2 keys to be split"):
            ids().split(segments)


def test_moving_keeps_all_but_the_place():
    moved = ids(torch.ones(5)).to("meta")
    assert moved.device().type == "meta" and moved.weights().device.type == "meta"
    assert moved.keys() == KEYS and moved.stride() == 3
    half = ids(torch.ones(5)).to("cpu", dtype=torch.float16)
    assert half.weights().dtype == torch.float16 and half.values().dtype == torch.int64
    one = JaggedTensor(torch.ones(2), torch.ones(2), torch.tensor([2]))
    assert one.to("cpu") is one and one.to("meta").weights().device.type == "meta"


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


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="without lengths and offsets"):
        JaggedTensor(torch.zeros(3))
    with pytest.raises(DataError, match="5 lengths for 2 keys"):
        KeyedJaggedTensor(KEYS, torch.arange(5), lengths=LENGTHS[:5])
    with pytest.raises(DataError, match="6 lengths for 2 keys and 4 samples"):
        KeyedJaggedTensor(KEYS, torch.arange(5), lengths=LENGTHS, stride=4)
    with pytest.raises(DataError, match="3 weights of 5 values"):
        ids(torch.ones(3))
    with pytest.raises(DataError, match=r"lengths of type torch.float32"):
        JaggedTensor(torch.zeros(3), lengths=torch.ones(3))
    with pytest.raises(DataError, match="lengths of 5 values in all; need as many as values, 4"):
        KeyedJaggedTensor(KEYS, torch.arange(4), lengths=LENGTHS).to_dict()
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
