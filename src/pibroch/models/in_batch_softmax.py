"""The softmax over the items of a global batch, its bias by frequent items corrected.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys
2019, Eq. 3 to 5: of user ``i`` and item ``j`` the logit is ``s_ij = <u_i, v_j> - log q_j``, and a
batch's loss ``-1/B sum_i w_i log softmax(s_i)_i``. ``w`` are rewards: label times weight. Other
samples of the item that sample ``i`` has are no negatives, and left out of its sum.

Differs from the paper: ``q`` is the item's share of the training samples, counted when the data
were prepared, where the paper estimates it from a stream.

Shape legend: B samples of all ranks, b of this rank, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pibroch.config.loss import InBatchSoftmaxConfig
from pibroch.models.losses import Loss
from pibroch.models.pairs import DistinctItems

Gather = Callable[[Tensor], Sequence[Tensor]]
"""What each rank gives, ``[b, ...]``, in rank order; all call it at the same time."""


@dataclass(frozen=True, slots=True)
class Positives:
    """A rank's samples, as pairs of a user and an item.

    Attributes:
        users: float32 ``[b, E]``, as all that follow but ``ids``.
        items: ``[b, E]``.
        ids: of the items, int64 ``[b]``.
        log_q: logarithms of the items' shares of the samples, ``[b]``.
        rewards: ``[b]``, at least 0.
    """

    users: Tensor
    items: Tensor
    ids: Tensor
    log_q: Tensor
    rewards: Tensor


class InBatchSoftmax(Loss):
    """A loss of the vectors of the global batch, see :meth:`of_vectors`."""

    section = InBatchSoftmaxConfig
    gives_probabilities = False

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Not to be called: see :meth:`of_vectors`."""
        raise NotImplementedError("the softmax is of the vectors of the global batch")

    @staticmethod
    @torch.no_grad()
    def of_vectors(own: Positives, gather: Gather, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The loss over B samples, a scalar, and its gradients by ``own.users`` and ``own.items``.

        Each of several ranks multiplies its users with the vectors of all items, and all users with
        those of its items; a rank alone does it once. Where equal items have equal vectors, each
        stands once for all its samples, and their gradients are the mean of these.
        """
        width = own.users.shape[1]
        numbers_own = [own.users, own.items, own.log_q[:, None], own.rewards[:, None]]
        parts = gather(torch.cat(numbers_own, 1))
        numbers = torch.cat(list(parts))
        ids = torch.cat(list(gather(own.ids)))
        users = numbers[:, :width]
        rewards = numbers[:, -1]
        first = sum(len(part) for part in parts[:rank])
        here = torch.arange(first, first + len(own.ids))
        table = _ItemTable.of(numbers[:, width : 2 * width], ids, numbers[:, -2])

        rows, places = table.logits(users, ids, here, None)
        norms = rows.logsumexp(1)
        losses = own.rewards * (norms - rows.gather(1, places[:, None])[:, 0])
        known = torch.cat(list(gather(torch.stack([norms, losses], 1))))
        shares = rows.sub_(norms[:, None]).exp_()
        by_users = own.rewards[:, None] * (shares @ table.vectors - own.items)

        columns = torch.arange(len(table.vectors))
        if len(parts) > 1:
            columns = table.columns[here].unique()
            shares, places = table.logits(users, ids, torch.arange(len(users)), columns)
            shares = shares.sub_(known[:, :1]).exp_()
        gained = rewards[:, None] * users
        by_columns = shares.mul_(rewards[:, None]).T @ users
        is_here = places >= 0
        by_columns.index_add_(0, places[is_here], gained[is_here], alpha=-1)
        by_columns /= table.counts[columns, None]
        by_items = by_columns[places[here] if len(parts) > 1 else places]
        count = max(1, len(numbers))
        loss = known[:, 1].double().sum() / count
        return loss.float(), by_users / count, by_items / count


@dataclass(frozen=True, slots=True)
class _ItemTable:
    """The vectors that users are compared with: U, one for each item, or one for each sample.

    Attributes:
        vectors: ``[U, E]``.
        columns: of each sample its item's, int64 ``[B]``.
        counts: samples of each, float32 ``[U]``.
        biases: what is added to a logit, ``[U]``.
        is_by_item: whether equal items share a vector.
    """

    vectors: Tensor
    columns: Tensor
    counts: Tensor
    biases: Tensor
    is_by_item: bool

    @classmethod
    def of(cls, items: Tensor, ids: Tensor, log_q: Tensor) -> _ItemTable:
        """Of all samples: one for each item where all its samples have the same vector."""
        distinct = DistinctItems.of(ids)
        vectors = items[distinct.firsts]
        if not torch.equal(vectors[distinct.places], items):
            return cls(items, torch.arange(len(ids)), torch.ones(len(ids)), -log_q, False)
        counts = distinct.counts.float()
        biases = counts.log() - log_q[distinct.firsts]
        return cls(vectors, distinct.places, counts, biases, True)

    def logits(
        self, users: Tensor, ids: Tensor, samples: Tensor, columns: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of these samples' users and these columns, all when absent; and the own item's place.

        An item's own samples count once for it, others of the same item not at all. The place is -1
        where the own item is in none of the columns.
        """
        vectors = self.vectors
        biases = self.biases
        places = self.columns[samples]
        if columns is not None:
            vectors = vectors[columns]
            biases = biases[columns]
            at = torch.searchsorted(columns, places).clamp(max=max(0, len(columns) - 1))
            places = torch.where(columns[at] == places, at, -1) if len(columns) else at - 1
        rows = users[samples] @ vectors.T + biases
        own = (places >= 0).nonzero()[:, 0]
        if self.is_by_item:
            rows[own, places[own]] -= self.counts[self.columns[samples[own]]].log()
        else:
            others = torch.arange(len(ids)) if columns is None else columns
            same = (ids[samples][:, None] == ids[others]) & (samples[:, None] != others)
            rows.masked_fill_(same, -torch.inf)
        return rows, places
