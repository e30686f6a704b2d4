import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pibroch.data import JaggedBatch
from pibroch.errors import DataError
from pibroch.torchrec import JaggedTensor, KeyedJaggedTensor

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
    for parts in ({"a": plain, "b": weighted}, {"b": weighted, "a": plain}):
        with pytest.raises(DataError, match=r"some have weights and some do not \(a\)"):
            KeyedJaggedTensor.from_jt_dict(parts)
    with pytest.raises(DataError, match="some have weights"):
        KeyedJaggedTensor.concat([ids(), ids(torch.ones(5))])
    with pytest.raises(DataError, match=r"keys \[\['a', 'b'\], \['c'\]\] of \[3, 1\] samples"):
        KeyedJaggedTensor.concat([ids(), KeyedJaggedTensor.from_jt_dict({"c": plain})])
    for join in (KeyedJaggedTensor.from_jt_dict, KeyedJaggedTensor.concat):
        with pytest.raises(DataError, match="at least one part"):
            join({})
    for places in ([2], [-1]):
        with pytest.raises(DataError, match=f"key {places[0]} of 2"):
            ids().permute(places)
    for segments in ([3], [1, 2], [-1, 2]):
        with pytest.raises(DataError, match="2 keys to be split"):
            ids().split(segments)


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="5 lengths for 2 keys"):
        KeyedJaggedTensor(KEYS, torch.arange(5), lengths=LENGTHS[:5])
    with pytest.raises(DataError, match="6 lengths for 2 keys and 4 samples"):
        KeyedJaggedTensor(KEYS, torch.arange(5), lengths=LENGTHS, stride=4)
    with pytest.raises(DataError, match="3 weights of 5 values"):
        ids(torch.ones(3))
    with pytest.raises(DataError, match="lengths of 5 values in all; need as many as values, 4"):
        KeyedJaggedTensor(KEYS, torch.arange(4), lengths=LENGTHS).to_dict()
    with pytest.raises(DataError, match=r"weights\(\) of a KeyedJaggedTensor"):
        ids().weights()
    with pytest.raises(DataError, match=r"6 lengths for 2 keys of \[2, 3\] samples"):
        KeyedJaggedTensor(KEYS, torch.arange(5), None, LENGTHS, None, None, [[2], [1, 2]])
    for wrong in ([3], [4, 2]):
        with pytest.raises(DataError, match=r"length_per_key=.* of 2 keys and 5 values"):
            KeyedJaggedTensor(KEYS, torch.arange(5), None, LENGTHS, length_per_key=wrong)
    with pytest.raises(DataError, match="inverse indices"):
        KeyedJaggedTensor.from_lengths_sync(
            KEYS, torch.arange(5), LENGTHS, inverse_indices=(KEYS, torch.zeros(2, 3))
        )
    with pytest.raises(TypeError, match="no argument 'strides'"):
        KeyedJaggedTensor(KEYS, torch.arange(5), None, LENGTHS, strides=[3, 3])


def test_moving_keeps_all_but_the_place():
    moved = ids(torch.ones(5)).to("meta")
    assert moved.device().type == "meta" and moved.weights().device.type == "meta"
    assert moved.keys() == KEYS and moved.stride() == 3
    half = ids(torch.ones(5)).to("cpu", dtype=torch.float16)
    assert half.weights().dtype == torch.float16 and half.values().dtype == torch.int64


def test_sums_of_lengths_are_taken_once():
    whole = ids()
    assert whole.length_per_key_or_none() is None and whole.offset_per_key_or_none() is None
    assert whole.sync() is whole
    assert (whole.length_per_key_or_none(), whole.offset_per_key_or_none()) == ([3, 2], [0, 3, 5])
    assert whole.permute([1, 0]).sync().to("meta").length_per_key() == [2, 3]
    assert whole.unsync().length_per_key_or_none() is None
    told = KeyedJaggedTensor(
        KEYS, torch.arange(5), None, LENGTHS, length_per_key=[1, 4], offset_per_key=[0, 1, 5]
    )
    assert told["a"].values().tolist() == [0] and told.unsync()["a"].values().tolist() == [0, 1, 2]
    assert ids().to("meta").length_per_key() == [3, 2]  # even shares: meta has no numbers


def test_ids_of_no_keys():
    none = KeyedJaggedTensor.empty(True, values_dtype=torch.int64, weights_dtype=torch.float16)
    assert (none.keys(), none.stride(), none.to_dict(), str(none)) == (
        [],
        0,
        {},
        "KeyedJaggedTensor()\n",
    )
    assert (none.values().dtype, none.weights().dtype) == (torch.int64, torch.float16)
    assert none.lengths().dtype == torch.int32 and none.offsets().tolist() == [0]
    like = KeyedJaggedTensor.empty_like(ids(torch.ones(5)))
    assert (like.keys(), like.stride(), len(like.weights())) == ([], 3, 0)
    assert KeyedJaggedTensor([], torch.arange(0)).stride() == 0


def test_lengths_of_two_dimensions_are_taken():
    table = KeyedJaggedTensor(KEYS, torch.arange(5), lengths=LENGTHS.view(2, 3))
    assert table.lengths().shape == (6,) and table.flatten_lengths() is table
    assert bags(table) == bags(ids())


@st.composite
def dictionaries(draw):
    """Bags of each key, weights too; the keys differ in their numbers of samples."""
    is_weighted = draw(st.booleans())
    bag = st.lists(st.integers(0, 9), max_size=3)
    keys = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    bags_of_keys = {key: draw(st.lists(bag, max_size=3)) for key in keys}
    return {key: (bags, bags if is_weighted else None) for key, bags in bags_of_keys.items()}


def joined(bags, scale, dtype):
    return torch.tensor([number * scale for bag in bags for number in bag], dtype=dtype)


@given(dictionaries(), st.randoms(use_true_random=False))
def test_keys_may_differ_in_their_samples(bags_of_keys, random):
    parts = {
        key: JaggedTensor(
            joined(bags, 1, torch.int64),
            None if weights is None else joined(weights, 0.5, torch.float32),
            torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
        )
        for key, (bags, weights) in bags_of_keys.items()
    }
    whole = KeyedJaggedTensor.from_jt_dict(parts)
    sizes = {key: len(values) for key, (values, _) in bags_of_keys.items()}
    keys = [*sizes]

    assert whole.stride_per_key() == list(sizes.values())
    assert whole.variable_stride_per_key() == (len(set(sizes.values())) > 1)
    assert whole.stride() == max(sizes.values())
    assert whole.lengths_offset_per_key()[-1] == len(whole.lengths()) == sum(sizes.values())

    def check(ragged, key):
        assert [bag.tolist() for bag in ragged.to_dense()] == bags_of_keys[key][0]
        weights = ragged.to_dense_weights()
        halves = None if weights is None else [(bag * 2).tolist() for bag in weights]
        assert halves == bags_of_keys[key][1]

    order = random.choices(range(len(keys)), k=3)
    taken = whole.permute(order)
    names = [keys[place] for place in order]
    assert taken.keys() == names
    assert taken.stride_per_key() == [sizes[key] for key in names]
    for part, key in zip(taken.split([1, 1, 1]), names, strict=True):
        check(part[key], key)
    cut = random.randrange(len(keys) + 1)
    again = KeyedJaggedTensor.concat(whole.split([cut, len(keys) - cut]))
    for key, ragged in again.to_dict().items():
        check(ragged, key)
    check(again.to("cpu")[keys[0]], keys[0])


def test_samples_by_rank_are_kept():
    by_rank = [[1, 1], [1, 3]]
    whole = KeyedJaggedTensor.from_lengths_sync(
        KEYS, torch.arange(5), LENGTHS, stride_per_key_per_rank=torch.tensor(by_rank)
    )
    assert whole.stride_per_key_per_rank() == by_rank and whole.stride() == 4
    turned = whole.permute([1, 0])
    assert turned.stride_per_key_per_rank() == by_rank[::-1] and turned.stride_per_key() == [4, 2]
    none = whole.permute([])
    assert (whole.split([1, 1])[0].stride(), none.stride()) == (4, 4)
    assert none.variable_stride_per_key() and not ids().permute([]).variable_stride_per_key()
    assert whole["a"].lengths().tolist() == [2, 0] and whole.index_per_key() == {"a": 0, "b": 1}
    assert ids().stride_per_key_per_rank() == [] and ids().inverse_indices_or_none() is None


def test_lookups_want_one_batch_size():
    def batch(*by_rank, keys=KEYS):
        return JaggedBatch.from_keyed_jagged(
            KeyedJaggedTensor(keys, torch.arange(5), None, LENGTHS, stride_per_key_per_rank=by_rank)
        )

    with pytest.raises(DataError, match=r"a batch size for each key, \[2, 4\]; need one"):
        batch([2], [4])
    assert batch([1, 2], [3, 0]).offsets.tolist() == ids().offsets().tolist()


def test_what_is_printed():
    assert (
        str(ids())
        == """\
KeyedJaggedTensor({
    "a": [[0, 1], [], [2]],
    "b": [[3], [4], []]
})
"""
    )
    assert (
        str(ids(torch.arange(5) / 2))
        == """\
KeyedJaggedTensor({
    "a": {
        "values": [[0, 1], [], [2]],
        "weights": [[0.0, 0.5], [], [1.0]]
    },
    "b": {
        "values": [[3], [4], []],
        "weights": [[1.5], [2.0], []]
    }
})
"""
    )


def test_pinning_and_streams_reach_all_tensors(monkeypatch):
    reached = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: reached.append((tensor, stream))
    )
    whole = ids(torch.ones(5))
    pinned = whole.pin_memory()
    assert bags(pinned) == bags(whole) and pinned.values() is not whole.values()
    pinned.offsets()
    pinned.record_stream("stream")
    names = ("values", "weights", "lengths", "offsets")
    assert [each for each, _ in reached] == [getattr(pinned, name)() for name in names]
    assert pinned.size_in_bytes() == 5 * 8 + 5 * 4 + 6 * 4 + 7 * 4
