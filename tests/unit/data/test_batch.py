import copy
import pickle

import numpy as np
import pytest
import torch

import malformed_batches
import pibroch as pb
from forked import context
from pibroch.data import JaggedBatch
from pibroch.errors import DataError

TIMEOUT_S = 250


def weighted_batch(**changes):
    parts = {
        "dense": torch.zeros(2, 1),
        "keys": ("a", "b"),
        "values": torch.tensor([1, 2, 3, 0]),
        "offsets": torch.tensor([0, 1, 3, 3, 4]),
        "labels": torch.zeros(2),
        "weights": torch.ones(4),
    }
    return JaggedBatch(**(parts | changes))


class Keyed:
    """Some methods of a KeyedJaggedTensor."""

    def __init__(self, values=(1, 2, 3), lengths=(2, 0, 0, 1), **methods):
        methods = {
            "keys": ["a", "b"],
            "values": torch.as_tensor(values),
            "lengths": torch.as_tensor(lengths),
        } | methods
        for name, answer in methods.items():
            setattr(self, name, lambda answer=answer: answer)


def test_no_malformed_batch_crashes_or_gives_nan(tmp_path):
    process = context().Process(target=malformed_batches.run, args=(tmp_path,))
    process.start()
    process.join(TIMEOUT_S)
    last = (tmp_path / "last").read_text().splitlines()[0]
    assert process.exitcode == 0, f"exit code {process.exitcode} at {last}"
    assert not (tmp_path / "failed").exists(), (tmp_path / "failed").read_text()
    num_sound, num_malformed = map(int, (tmp_path / "done").read_text().split())
    assert num_malformed > 400 and num_sound > 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"offsets": torch.tensor([0, 1, 9, 3, 4])},
            r"offset 3 after 9 for feature 'b' in sample 0",
        ),
        ({"offsets": torch.tensor([0, 2**63 - 1, -(2**63), 3, 4])}, "never fall"),
        (
            {"offsets": torch.tensor([0, 1, 3, 3])},
            r"4 offsets for 2 keys and 2 labels.*2 \* 2 \+ 1",
        ),
        ({"offsets": torch.tensor([0, 1, 3, 3, 5])}, "last offset 5.*number of values, 4"),
        ({"offsets": torch.tensor([1, 1, 3, 3, 4])}, "first offset 1"),
        ({"weights": torch.ones(3)}, r"weights float32 \[3\] for 4 values"),
        ({"weights": torch.tensor([1, 1, torch.nan, 1])}, "weight nan of value 2"),
        (
            {"weights": torch.tensor([1, 1, 1e300, 1], dtype=torch.float64)},
            r"weight 1e\+300 of value 2",
        ),
        ({"values": torch.tensor([1.5, 2, 3, 0])}, r"values float32 \[4\]; need int64"),
        (
            {"labels": torch.zeros(3)},
            "dense float32 .2, 1.; need float32 .3, n., a row for each label",
        ),
        ({"labels": [0, 1]}, "labels that are a list; need a torch tensor"),
        (
            {"values": torch.zeros(4, dtype=torch.int64, device="meta")},
            "on meta; need a dense tensor on the CPU",
        ),
        ({"keys": ("a", "a")}, "key 'a' twice"),
        ({"keys": "ab"}, "need a tuple of feature names"),
    ],
)
def test_a_malformed_batch_is_refused_where_it_is_made(changes, message):
    with pytest.raises(DataError, match=message):
        weighted_batch(**changes)


def test_what_was_written_to_a_batch_is_checked_when_it_enters():
    embeddings = pb.Embeddings([pb.Table("a", 9, 4), pb.Table("b", 9, 4)], pb.SGD(lr=1.0))
    batch = weighted_batch()
    for same in (batch, copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        same.offsets[2] = 4
        with pytest.raises(DataError, match="offset 3 after 4"):
            embeddings(same)
        with pytest.raises(DataError, match="offset 3 after 4"):
            next(iter(embeddings.feed([same])))


def test_float_ids_of_one_hot_bags_are_refused():
    with pytest.raises(DataError, match="values float32"):
        JaggedBatch.from_one_hot(
            torch.zeros(2, 0), ["a"], torch.tensor([[1.0, 2.0]]), torch.zeros(2)
        )
    with pytest.raises(DataError, match="3 offsets for 1 keys and 3 labels"):
        JaggedBatch.from_one_hot(torch.zeros(3, 0), ["a"], torch.tensor([[1, 2]]), torch.zeros(3))


@pytest.mark.parametrize(
    ("keyed", "message"),
    [
        (Keyed(values=(1.0, 2.5, 3.0)), "values float32"),
        (Keyed(lengths=(2.0, 0.0, 0.0, 1.0)), "lengths float32"),
        (Keyed(lengths=(3, -1, 0, 1)), "offset 2 after 3"),
        (Keyed(lengths=(2, 0, 1)), "3 lengths for 2 keys"),
        (Keyed(stride=3), "4 lengths for 2 keys and 3 samples"),
        (
            Keyed(stride_per_key=[1, 3], variable_stride_per_key=True, stride=3),
            r"for each key, \[1, 3\]; need one batch size",
        ),
        (Keyed(variable_stride_per_key=True), "a batch size for each key; need one"),
        (Keyed(inverse_indices_or_none=(["a"], torch.tensor([0, 0]))), "no inverse indices"),
        (Keyed(weights_or_none=torch.ones(2)), "weights float32 .2. for 3 values"),
        (Keyed(values=np.array([1, 2, 3]), lengths=torch.tensor([2, 0, 0, 1])), None),
    ],
)
def test_keyed_jagged_tensors_that_would_put_ids_to_the_wrong_sample(keyed, message):
    if message is None:
        keyed.values = lambda: np.array([1, 2, 3])
        message = "values that are a ndarray"
    with pytest.raises(DataError, match=message):
        JaggedBatch.from_keyed_jagged(keyed)


def test_keyed_jagged_tensors_of_one_batch_size_are_taken():
    keyed = Keyed(
        stride=2, stride_per_key=[2, 2], variable_stride_per_key=False, inverse_indices_or_none=None
    )
    assert JaggedBatch.from_keyed_jagged(keyed).offsets.tolist() == [0, 2, 2, 2, 3]


def test_a_feature_may_be_selected_twice():
    """As by a table in blocks of columns; a batch of the user's has each feature once."""
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(2, 0), ["a", "b"], torch.tensor([[1, 2], [3, 4]]), torch.zeros(2)
    )
    twice = batch.select(("b", "a", "b"))
    assert twice.keys == ("b", "a", "b") and twice.values.tolist() == [3, 4, 1, 2, 3, 4]
    assert twice.offsets.tolist() == list(range(7)) and twice.labels is batch.labels


@pytest.mark.parametrize(
    ("keys", "is_copied"), [(("b", "c"), False), (("c", "a"), True), (("b",), False), ((), False)]
)
def test_features_that_stand_together_are_picked_without_a_copy(keys, is_copied):
    ids = torch.arange(6).view(3, 2)
    batch = JaggedBatch.from_one_hot(torch.zeros(2, 0), ["a", "b", "c"], ids, torch.zeros(2))
    picked = batch.pick(keys)
    assert picked.values.tolist() == [
        number for key in keys for number in ids["abc".index(key)].tolist()
    ]
    inside = picked.values.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
    assert inside is not is_copied
