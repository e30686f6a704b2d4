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

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Not to be called: see :meth:`of_vectors`."""
        raise NotImplementedError("the softmax is of the vectors of the global batch")

    @staticmethod
    @torch.no_grad()
    def of_vectors(own: Positives, gather: Gather, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """The loss over B samples, a scalar, and its gradients by ``own.users`` and ``own.items``.

        Each of several ranks multiplies its users with all items, and all users with its items:
        about ``4 b B E`` products, and ``2 b B`` numbers of memory; a rank alone does it once.
        """
        width = own.users.shape[1]
        columns = [own.users, own.items, own.log_q[:, None], own.rewards[:, None]]
        parts = gather(torch.cat(columns, 1))
        numbers = torch.cat(list(parts))
        ids = torch.cat(list(gather(own.ids)))
        users = numbers[:, :width]
        items = numbers[:, width : 2 * width]
        log_q = numbers[:, -2]
        rewards = numbers[:, -1]
        size = len(numbers)
        first = sum(len(part) for part in parts[:rank])
        here = torch.arange(first, first + len(own.ids))
        samples = torch.arange(size)

        rows = own.users @ items.T - log_q
        rows.masked_fill_((own.ids[:, None] == ids) & (here[:, None] != samples), -torch.inf)
        norms = rows.logsumexp(1)
        losses = own.rewards * (norms - rows.gather(1, here[:, None])[:, 0])
        known = torch.cat(list(gather(torch.stack([norms, losses], 1))))
        shares = rows.sub_(norms[:, None]).exp_()
        by_users = own.rewards[:, None] * (shares @ items - own.items)

        if len(parts) > 1:
            columns_here = users @ own.items.T - own.log_q
            columns_here.masked_fill_(
                (ids[:, None] == own.ids) & (samples[:, None] != here), -torch.inf
            )
            shares = columns_here.sub_(known[:, :1]).exp_()
        by_items = shares.mul_(rewards[:, None]).T @ users - own.rewards[:, None] * own.users
        loss = known[:, 1].double().sum() / size
        return loss.float(), by_users / size, by_items / size
