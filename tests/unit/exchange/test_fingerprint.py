"""Batches whose tensors a loader fills again while they are read ahead."""

import dataclasses

import pytest
import torch

import pibroch as pb
from pibroch.errors import DataError
from pibroch.exchange.fingerprint import Fingerprint
from pibroch.torchrec import KeyedJaggedTensor

AHEAD = ["alltoall", "lookahead", "retrieve"]


@dataclasses.dataclass
class Clicks:
    ids: KeyedJaggedTensor
    dense: torch.Tensor
    names: list[str]


class Loader:
    """Six batches of two samples, in ``num_buffers`` sets of tensors; ``fill`` says which are
    filled again, and how.
    """

    def __init__(self, fill, num_buffers=1, own=False):
        self.fill = fill
        self.own = own
        self.buffers = [
            (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(2))
            for _ in range(num_buffers)
        ]

    def __iter__(self):
        for number in range(6):
            ids, dense, labels = self.buffers[number % len(self.buffers)]
            if self.fill == "ids":
                ids.copy_(torch.tensor([[2 * number, 2 * number + 1]]))
            elif self.fill == "order of ids":
                ids.copy_(torch.tensor([[number % 2, 1 - number % 2]]))
            elif self.fill == "ids by numpy":
                ids.numpy()[:] = number
            elif self.fill == "dense":
                dense.fill_(number)
            elif self.fill == "labels":
                labels.fill_(number)
            if self.own:
                lengths = torch.ones(2, dtype=torch.int64)
                ragged = KeyedJaggedTensor(["a"], ids.view(-1), lengths=lengths)
                yield Clicks(ragged, dense, ["x", "y"])
            else:
                yield pb.JaggedBatch.from_one_hot(dense, ["a"], ids, labels)


def train(exchange, loader, key=None):
    """The ids that were looked up."""
    embeddings = pb.Embeddings([pb.Table("a", 12, 2)], pb.SGD(lr=1.0), exchange=exchange)
    seen = []
    for batch in embeddings.feed(loader, key=key):
        batch_ids = batch if key is None else key(batch)
        embeddings(batch_ids).sum().backward()
        values = batch_ids.values if key is None else batch_ids.values()
        seen.append(values.tolist())
    return seen


@pytest.mark.parametrize("fill", ["ids", "order of ids", "ids by numpy", "dense", "labels"])
@pytest.mark.parametrize("exchange", AHEAD)
def test_what_is_filled_again_is_refused(exchange, fill):
    with pytest.raises(DataError, match="written to after feed"):
        train(exchange, Loader(fill))


@pytest.mark.parametrize("fill", ["ids", "dense"])
def test_so_are_batches_of_other_kinds(fill):
    with pytest.raises(DataError, match="clones"):
        train("alltoall", Loader(fill, own=True), key=lambda clicks: clicks.ids)


@pytest.mark.parametrize("exchange", AHEAD)
def test_tensors_that_many_batches_share_are_fine(exchange):
    assert train(exchange, Loader("nothing")) == [[0, 0]] * 6


def test_who_reads_nothing_ahead_may_fill_again_and_so_may_rings_that_are_long_enough():
    want = [[2 * number, 2 * number + 1] for number in range(6)]
    assert train("local", Loader("ids")) == want
    assert train("alltoall", Loader("ids", num_buffers=4)) == want


def test_a_loop_that_changes_ids_before_they_are_looked_up_is_refused():
    embeddings = pb.Embeddings([pb.Table("a", 12, 2)], pb.SGD(lr=1.0), exchange="alltoall")
    for batch in embeddings.feed(Loader("nothing", num_buffers=6)):
        batch.dense.add_(1)
        batch.values.add_(1)
        with pytest.raises(DataError, match="written to"):
            embeddings(batch)
        break


@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_tensors_of_any_strides_and_types_are_read(num_samples):
    """A rank's part may be one sample, or none, cut out of a larger tensor or spread by a view."""
    dense = torch.zeros(1, 1).expand(num_samples, 2)
    labels = torch.zeros(8, 2)[:num_samples, 0]
    ids = torch.zeros(2, 8, dtype=torch.int64)
    extra = {
        "narrow": torch.zeros(3, 4, dtype=torch.bfloat16).T,
        "flags": torch.tensor([True])[:num_samples],
        "scale": torch.tensor(2.0),
        "spread": torch.zeros(1).expand(num_samples),
    }
    batch = pb.JaggedBatch.from_one_hot(dense, ["a", "b"], ids[:, :num_samples], labels)
    fingerprint = Fingerprint([batch, extra], batch)
    fingerprint.check_ids()
    fingerprint.check_others()
    extra["narrow"][1, 2] = 1
    with pytest.raises(DataError, match="written to"):
        fingerprint.check_others()
