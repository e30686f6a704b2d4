import numpy as np
import pytest

from pibroch.data.encode import Encoders, FeatureEncoder
from pibroch.data.kernels.text import EMPTY_CODE
from pibroch.data.parse import field_codes
from pibroch.data.schema import CategoricalFeature
from pibroch.errors import DataError


def encoder(values: list[str] | None = None, **settings) -> FeatureEncoder:
    """An encoder whose vocabulary holds ``values`` in this order."""
    feature = CategoricalFeature(name="f", column="f", **settings)
    hashed = CategoricalFeature(name="f", column="f", encoding="hash", num_buckets=1)
    text = "".join(values or []).encode() or b"?"
    ends = np.cumsum([len(value.encode()) for value in values or []], dtype=np.int64)
    starts = np.concatenate([[0], ends])[: len(ends)].astype(np.int64)
    codes = field_codes(hashed, (np.frombuffer(text, np.uint8), starts, ends)).values
    return FeatureEncoder(feature, codes if feature.fixed_num_rows is None else None)


def test_vocabulary_rows_follow_its_order():
    words = [f"w{i}" for i in range(5000)]
    vocabulary = encoder(words)
    assert vocabulary.num_rows == 5002
    assert vocabulary.encode(words)[0].tolist() == list(range(2, 5002))
    assert vocabulary.encode(["w3", "", None, "unseen", 7])[0].tolist() == [5, 1, 1, 0, 0]


def test_numbers_and_their_text_are_the_same_value():
    vocabulary = encoder(["5", "1.5", "1"])
    assert (
        vocabulary.encode([5, 1.5, True])[0].tolist()
        == vocabulary.encode(["5", "1.5", "1"])[0].tolist()
        == [2, 3, 4]
    )


def test_an_empty_vocabulary_knows_nothing():
    assert encoder([]).encode(["a", ""])[0].tolist() == [0, 1]
    assert encoder([]).num_rows == 2


def test_hash_fills_its_buckets_and_nothing_else():
    hashed = encoder(encoding="hash", num_buckets=10)
    rows = hashed.encode([str(i) for i in range(1000)])[0]
    assert set(rows.tolist()) == set(range(2, 12))
    assert hashed.encode([None])[0].tolist() == [1]
    assert hashed.num_rows == 12


def test_integers_outside_are_unknown():
    integers = encoder(encoding="integer", num_buckets=3)
    assert integers.encode([0, 2, 3, -1, 1.5, "x", None])[0].tolist() == [2, 4, 0, 0, 0, 0, 1]


def test_bins_refuse_what_is_no_number():
    bins = encoder(binning="log")
    assert bins.encode([0, None])[0].tolist() == [5, 1]
    with pytest.raises(DataError, match="`many` as f of sample 0"):
        bins.encode(["many"])


def test_multi_hot_takes_lists_and_delimited_text():
    bags = encoder(["a", "b"], multi_hot=True, delimiter=";")
    for values in ([["a", "b"], [], ["b", "zz"], None], ["a;b", "", "b;zz", None]):
        rows, lengths = bags.encode(values)
        assert rows.tolist() == [2, 3, 3, 0]
        assert lengths.tolist() == [2, 0, 2, 0]


def test_stacked_dictionaries_give_the_rows_of_each():
    words = {"a": [f"w{i}" for i in range(300)], "b": [], "c": ["w7", "w0"]}
    encoders = Encoders({name: encoder(values) for name, values in words.items()})
    codes = np.concatenate([encoders["a"]._vocabulary, np.array([EMPTY_CODE, 12345], np.uint64)])
    for names in (["a", "b", "c"], ["c", "a"]):
        stacked_rows = encoders.stacked.rows(names, np.stack([codes] * len(names)))
        assert stacked_rows.dtype == np.int64
        for rows, name in zip(stacked_rows, names, strict=True):
            assert name in encoders.stacked and np.array_equal(rows, encoders[name].ids(codes))


def test_large_dictionaries_are_not_copied(monkeypatch):
    monkeypatch.setattr("pibroch.data.encode.STACKED_BYTES", 800)
    encoders = Encoders({"large": encoder([f"w{i}" for i in range(51)]), "small": encoder(["a"])})
    assert "large" not in encoders.stacked and "small" in encoders.stacked
