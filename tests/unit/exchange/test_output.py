"""Vectors of sequences, padded and summed."""

import pytest
import torch

from pibroch.errors import ConfigError
from pibroch.exchange.output import JaggedEmbeddings

LENGTHS = [2, 0, 4, 1]


@pytest.fixture
def jagged() -> JaggedEmbeddings:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return JaggedEmbeddings(torch.randn(7, 3, requires_grad=True), offsets)


@pytest.mark.parametrize("length", [1, 2, 4, 6])
@pytest.mark.parametrize("last", [False, True])
def test_padded_vectors_and_their_mask(jagged: JaggedEmbeddings, length: int, last: bool) -> None:
    padded, mask = (make(length, last) for make in (jagged.padded, jagged.mask))
    bags = jagged.values.split(LENGTHS)
    for sample, bag in enumerate(bags):
        count = min(length, len(bag))
        kept = bag[len(bag) - count :] if last else bag[:count]
        nothing = torch.zeros(length - count, 3)
        assert torch.equal(padded[sample], torch.cat([nothing, kept] if last else [kept, nothing]))
        held = [True] * count + [False] * (length - count)
        assert mask[sample].tolist() == (held[::-1] if last else held)
    padded.sum().backward()
    assert jagged.values.grad is not None
    assert jagged.values.grad.sum() == 3 * mask.sum()


def test_summed_vectors(jagged: JaggedEmbeddings) -> None:
    want = torch.stack([bag.sum(0) for bag in jagged.values.split(LENGTHS)])
    torch.testing.assert_close(jagged.summed(), want)
    one_hot = JaggedEmbeddings(jagged.values, torch.arange(8))
    assert one_hot.summed() is jagged.values
    none = JaggedEmbeddings(torch.zeros(0, 3), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(none.summed(), torch.zeros(3, 3))


def test_no_length_is_refused(jagged: JaggedEmbeddings) -> None:
    with pytest.raises(ConfigError, match="sequences padded to 0"):
        jagged.padded(0)
