"""Losses that compare samples with each other, over the whole global batch.

A pair's samples may be on two ranks. So every rank gets the logits of all, works out the same loss
and the same gradient of each logit in float64, and goes back from those of its own samples: see
:mod:`pibroch.train.criterion`.

Shape legend: B samples of all ranks, P pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pibroch.config.loss import PairwiseConfig, SoftmaxConfig
from pibroch.models.losses import Loss

Floats = NDArray[np.float64]
BLOCK_ROWS = 512
"""Samples of a group that are compared with all of it at once."""


class RankingLoss(Loss):
    """A loss of the global batch."""

    gives_probabilities = False

    @abstractmethod
    def of_batch(
        self, logits: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> tuple[float, Floats]:
        """The loss and its gradient by each logit ``[B]``.

        Args:
            logits: ``[B]``, in the order of the global batch, as all that follow.
            labels: ``[B]``, higher ones are better.
            weights: ``[B]``, at least 0.
            groups: ``[B]``; samples of one group alone are compared with each other.
        """

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Not to be called: see :meth:`of_batch`."""
        raise NotImplementedError("a ranking loss is of the global batch")


class Pairwise(RankingLoss):
    """``-log sigmoid(s_i - s_j)``, the mean over pairs of a group with labels ``y_i > y_j``.

    Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit Feedback", UAI 2009, Eq. 3,
    over the pairs that a batch holds. A pair weighs what its better sample weighs. Without groups
    the whole batch is one. The cost is quadratic in the size of a group.

    >>> loss, gradient = Pairwise(PairwiseConfig()).of_batch(
    ...     np.array([1.0, 1.0]), np.array([1.0, 0.0]), np.ones(2), np.zeros(2, np.int64)
    ... )
    >>> round(loss, 4), gradient.tolist()
    (0.6931, [-0.5, 0.5])
    """

    section = PairwiseConfig

    def of_batch(
        self, logits: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> tuple[float, Floats]:
        """See :class:`RankingLoss`."""
        loss = total = 0.0
        gradient = np.zeros(len(logits))
        for members in _groups(groups):
            if (labels[members] == labels[members[0]]).all():
                continue
            for first in range(0, len(members), BLOCK_ROWS):
                rows = members[first : first + BLOCK_ROWS]
                margins = logits[rows, None] - logits[members]
                pairs = (labels[rows, None] > labels[members]) * weights[rows, None]
                slopes = pairs * np.exp(-np.logaddexp(0.0, margins))
                loss += float((pairs * np.logaddexp(0.0, -margins)).sum())
                total += float(pairs.sum())
                gradient[rows] -= slopes.sum(1)
                gradient[members] += slopes.sum(0)
        return (loss / total, gradient / total) if total else (0.0, gradient)


class GroupSoftmax(RankingLoss):
    """``-sum_i q_i log softmax(s)_i`` over a group, the mean over groups with a positive.

    ``q`` are the labels, at least 0, times the weights, divided by their sum in the group: the
    top-one cross-entropy of Cao et al., "Learning to Rank: From Pairwise Approach to Listwise
    Approach", ICML 2007. A group weighs the mean of its samples' weights by these labels.

    >>> loss, gradient = GroupSoftmax(SoftmaxConfig()).of_batch(
    ...     np.zeros(4), np.array([0.0, 1.0, 0.0, 0.0]), np.ones(4), np.array([5, 5, 5, 5])
    ... )
    >>> round(loss, 4), gradient.tolist()
    (1.3863, [0.25, -0.75, 0.25, 0.25])
    """

    section = SoftmaxConfig

    def of_batch(
        self, logits: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> tuple[float, Floats]:
        """See :class:`RankingLoss`."""
        loss = total = 0.0
        gradient = np.zeros(len(logits))
        for members in _groups(groups):
            relevance = np.maximum(labels[members], 0.0)
            shares = relevance * weights[members]
            if not shares.sum():
                continue
            weight = shares.sum() / relevance.sum()
            shares /= shares.sum()
            logs = logits[members] - np.logaddexp.reduce(logits[members])
            loss -= float(weight * (shares @ logs))
            total += float(weight)
            gradient[members] = weight * (np.exp(logs) - shares)
        return (loss / total, gradient / total) if total else (0.0, gradient)


def _groups(groups: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Places of each group's samples, rising, of groups that have more than one."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, starts):
        if len(members) > 1:
            yield members
