"""Vectors of sequences, padded and summed."""

import pytest
import torch

import pibroch as pb
from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError
from pibroch.exchange.output import EmbeddingOutput, JaggedEmbeddings

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


def test_outputs_are_split_by_samples() -> None:
    """Two pooled tables of two widths, and one of sequences that two features read."""
    tables = [
        pb.Table("a", num_rows=9, dim=2),
        pb.Table("b", num_rows=9, dim=3),
        pb.Table("items", num_rows=9, dim=4, features=("item", "history"), pooling="none"),
    ]
    embeddings = pb.Embeddings(tables, optimizer=pb.SGD(lr=1.0))
    lengths = torch.tensor([[1] * 4, [2, 0, 1, 1], [1] * 4, LENGTHS])
    values = torch.arange(int(lengths.sum())) % 9
    offsets = torch.tensor([0, *lengths.flatten()]).cumsum(0)
    keys = ("a", "b", "item", "history")
    batch = JaggedBatch(torch.zeros(4, 0), keys, values, offsets, torch.zeros(4))
    out = embeddings(batch)
    assert isinstance(out, EmbeddingOutput)
    sizes = (1, 2, 1)
    pieces = out.split(sizes)
    assert [piece.batch_size for piece in pieces] == list(sizes)
    assert torch.equal(torch.cat([piece.cat() for piece in pieces]), out.cat())
    for name in ("item", "history"):
        whole, *parts = (_jagged(each, name) for each in (out, *pieces))
        assert torch.equal(torch.cat([part.lengths() for part in parts]), whole.lengths())
        assert torch.equal(torch.cat([part.values for part in parts]), whole.values)
    doubled = pieces[1].with_tensors([each * 2 for each in pieces[1].tensors])
    expected = 2 * _jagged(pieces[1], "history").values
    assert torch.equal(_jagged(doubled, "history").values, expected)


def _jagged(output: EmbeddingOutput, name: str) -> JaggedEmbeddings:
    part = output[name]
    assert isinstance(part, JaggedEmbeddings)
    return part
