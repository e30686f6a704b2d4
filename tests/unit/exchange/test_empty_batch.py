from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError
from pibroch.exchange.empty_batch import Filler, without_samples
from pibroch.torchrec import JaggedTensor, KeyedJaggedTensor

Pair = namedtuple("Pair", "ids labels")


@dataclass(frozen=True)
class Batch:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    extra: object


def ids():
    return KeyedJaggedTensor(["a", "b"], torch.arange(4), torch.ones(4), torch.tensor([1, 1, 0, 2]))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [(lambda part: [part], lambda made: made[0]), (lambda part: part, lambda made: made)],
)
def test_a_batch_loses_its_samples_and_nothing_else(wrap, unwrap):
    batch = Batch(
        torch.ones(2, 3),
        ids(),
        wrap(SimpleNamespace(labels=torch.ones(2), scale=torch.ones(5), name="n")),
    )
    made = without_samples({"batch": batch}, 2)["batch"]
    assert isinstance(made, Batch) and made.dense.shape == (0, 3)
    assert (
        made.ids.keys() == ["a", "b"]
        and made.ids.stride() == 0
        and made.ids.weights().shape == (0,)
    )
    inside = unwrap(made.extra)
    assert (inside.labels.shape, inside.scale.shape, inside.name) == ((0,), (5,), "n")
    assert batch.dense.shape == (2, 3) and batch.ids.stride() == 2, "the batch itself stays"


def test_tuples_keep_their_type():
    made = without_samples(
        Pair(JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([1, 2])), torch.ones(2)), 2
    )
    assert (
        isinstance(made, Pair) and made.ids.values().shape == (0, 4) and made.labels.shape == (0,)
    )


def test_what_cannot_be_made_asks_for_a_function():
    class Odd:
        def __init__(self, path):
            self.path = path

        def values(self):
            return torch.ones(2)

        def lengths(self):
            return torch.ones(2)

    with pytest.raises(ConfigError, match=r"a Odd on a rank.*empty=FUNCTION"):
        without_samples(Odd("x"), 2)


def test_a_rank_that_never_had_a_batch_is_told_so():
    with pytest.raises(
        ConfigError, match=r"a rank without any batch in feed\(\.\.\., key=\.\.\.\)"
    ):
        Filler(lambda batch: batch.ids, None).make(None)
    assert Filler(None, None).make("the exchange's own") == (
        "the exchange's own",
        "the exchange's own",
    )


def test_a_function_that_leaves_samples_in_is_told_so():
    batch = Batch(torch.ones(2, 3), ids(), None)
    filler = Filler(lambda each: each.ids, lambda each: each)
    filler.follow(batch, JaggedBatch.from_keyed_jagged(batch.ids))
    with pytest.raises(ConfigError, match=r"ids with 4 lengths of a batch that empty= made"):
        filler.make(None)
