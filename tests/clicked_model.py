"""A model around tables, and batches for it, small enough to be compared number by number."""

import torch
from torch import nn

import pibroch as pb


class Clicks(nn.Module):
    """Rows before the dense layers, as torch's own tools meet them."""

    def __init__(self, optimizer=None, **options):
        super().__init__()
        self.table = pb.Embeddings([pb.Table("a", 6, 4)], optimizer or pb.SGD(lr=0.5), **options)
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, batch):
        return self.net(torch.cat([x, self.table(batch)[:, 0].to(x.dtype)], 1)).squeeze(1)

    @property
    def rows(self):
        """A copy of all rows."""
        return self.table.full_state_dict()["embedding_bags.a.weight"].clone()


def ids(*numbers):
    """A batch of one feature, one id a sample."""
    size = len(numbers)
    return pb.JaggedBatch.from_one_hot(
        torch.zeros(size, 0), ["a"], torch.tensor([numbers]), torch.zeros(size)
    )


def ones(size, **options):
    """The dense input."""
    return torch.ones(size, 1, **options)
