from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pibroch.collectives.samples import samples_of
from pibroch.errors import ConfigError
from pibroch.torchrec import KeyedJaggedTensor

IDS = KeyedJaggedTensor(["a", "b", "c"], torch.arange(7), lengths=torch.tensor([1, 1, 3, 0, 2, 0]))


@dataclass
class Batch:
    ids: KeyedJaggedTensor
    dense: torch.Tensor


@pytest.mark.parametrize(
    "arguments",
    [
        [torch.ones(2, 5), torch.ones(7)],
        [torch.tensor(1.0), torch.ones(2)],
        [IDS, torch.ones(7)],
        [partial(max, torch.ones(9)), Batch(IDS, torch.ones(2, 3))],
        [SimpleNamespace(ids=IDS, deeper=[{"labels": torch.ones(2)}], weight=torch.tensor(3.0))],
        [SimpleNamespace(batch_size=2, offsets=torch.ones(9))],
    ],
)
def test_samples_are_found_in_what_a_model_is_called_with(arguments):
    assert samples_of(*arguments) == 2
    assert samples_of(**{f"x{place}": each for place, each in enumerate(arguments)}) == 2


def test_a_batch_that_holds_itself_ends():
    batch = SimpleNamespace(dense=torch.ones(3))
    batch.whole = batch
    assert samples_of(batch) == 3


def test_what_is_not_clear_has_to_be_told():
    with pytest.raises(ConfigError, match=r"\[2, 9\] samples.*num_samples=lambda"):
        samples_of(Batch(IDS, torch.ones(9)))
    with pytest.raises(ConfigError, match=r"without a tensor.*num_samples=lambda"):
        samples_of("text", SimpleNamespace(a=1), torch.nn.Linear(2, 2))
