"""What an order of samples within groups is worth: GAUC, NDCG@k, HR@k.

Counted over blocks of equal logits, so that figures do not depend on the order in which samples
came: positives that share a block with negatives count as they would on average over its orders.

With weights a pair of GAUC weighs what its samples weigh, multiplied. Places have no weights: of
NDCG and HR it is groups that weigh, the mean of what their samples do, as LightGBM has it.

Shape legend: N samples, G groups, M blocks of samples of one group with one logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


def ranking_figures(
    logits: NDArray[np.float32],
    labels: NDArray[np.bool_],
    groups: NDArray[np.int64],
    top: Sequence[int],
    weights: Floats | None = None,
) -> dict[str, float]:
    """Figures by name; NaN where no group says anything. Costs one sort.

    ``gauc`` is the mean AUC of the groups with both kinds of labels, weighted with their samples
    (Zhu et al., "Optimized Cost per Click in Taobao Display Advertising", KDD 2017). Over groups
    with a positive, ``ndcg@k`` is the mean of their NDCG with gains 0 and 1, and ``hr@k`` the share
    of those that have a positive among the k best.

    Args:
        logits: ``[N]``.
        labels: ``[N]``.
        groups: ``[N]``.
        top: the k, each at least 1.
        weights: above 0 ``[N]``; 1 when absent.

    >>> figures = ranking_figures(
    ...     np.array([3, 2, 1, 2, 1], np.float32), np.array([0, 1, 0, 1, 0], bool),
    ...     np.array([7, 7, 7, 9, 9]), [1],
    ... )
    >>> {name: round(value, 2) for name, value in figures.items()}
    {'gauc': 0.7, 'ndcg@1': 0.5, 'hr@1': 0.5}
    """
    blocks = _blocks(logits, labels, groups, weights)
    return {
        "gauc": _gauc(blocks),
        **{f"ndcg@{k}": _ndcg(blocks, k) for k in top},
        **{f"hr@{k}": _hit_rate(blocks, k) for k in top},
    }


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks, best first within each group, group by group.

    Attributes:
        sizes: samples of each block ``[M]``.
        positives: of them ``[M]``.
        before: samples of the group in better blocks ``[M]``.
        first: the first block of each group ``[G]``.
        of_group: the group of each block ``[M]``.
        group_sizes, group_positives: ``[G]``.
        negative_weights, positive_weights: of the samples of each block ``[M]``, their numbers
            where samples have no weights.
        group_weights: means of the samples' weights ``[G]``; ``None`` for all ones.
    """

    sizes: Counts
    positives: Counts
    before: Counts
    first: Counts
    of_group: Counts
    group_sizes: Counts
    group_positives: Counts
    negative_weights: Counts | Floats
    positive_weights: Counts | Floats
    group_weights: Floats | None


def _blocks(
    logits: NDArray[np.float32],
    labels: NDArray[np.bool_],
    groups: NDArray[np.int64],
    weights: Floats | None,
) -> _Blocks:
    # sums of weights are not to depend on the order in which samples came
    order = np.lexsort((*(() if weights is None else (weights, labels)), -logits, groups))
    logits = logits[order]
    labels = labels[order]
    groups = groups[order]
    begins_group = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    begins = begins_group | np.append(True, logits[1:] != logits[:-1])[: len(groups)]
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, len(order)))
    hits = np.append(0, np.cumsum(labels, dtype=np.int64))
    positives = hits[starts + sizes] - hits[starts]
    first = np.flatnonzero(begins_group[starts])
    of_group = np.cumsum(begins_group[starts]) - 1
    group_sizes = _by_group(sizes, first)
    negative_weights: Counts | Floats = sizes - positives
    positive_weights: Counts | Floats = positives
    group_weights = None
    if weights is not None:
        weights = weights[order]
        negative_weights = _by_group(weights * ~labels, starts)
        positive_weights = _by_group(weights * labels, starts)
        group_weights = _by_group(negative_weights + positive_weights, first) / group_sizes
    return _Blocks(
        sizes,
        positives,
        starts - starts[first][of_group],
        first,
        of_group,
        group_sizes,
        _by_group(positives, first),
        negative_weights,
        positive_weights,
        group_weights,
    )


def _by_group(values: NDArray[Any], first: Counts) -> NDArray[Any]:
    return np.add.reduceat(values, first) if len(first) else np.zeros(0, values.dtype)


def _gauc(blocks: _Blocks) -> float:
    ahead = np.cumsum(blocks.positive_weights) - blocks.positive_weights
    ahead = ahead - ahead[blocks.first][blocks.of_group]  # positives in better blocks
    ties = 2 * ahead + blocks.positive_weights
    twice = _by_group(blocks.negative_weights * ties, blocks.first)
    negatives = _by_group(blocks.negative_weights, blocks.first)
    positives = _by_group(blocks.positive_weights, blocks.first)
    pairs = positives * negatives
    has_both = pairs > 0
    if not has_both.any():
        return math.nan
    areas = twice[has_both] / (2 * pairs[has_both])
    sizes = (negatives + positives)[has_both]
    return float((areas * sizes).sum() / sizes.sum())


def _mean(values: Floats, blocks: _Blocks, of: NDArray[np.bool_]) -> float:
    """Of these groups."""
    weights = blocks.group_weights
    return float(np.average(values, weights=None if weights is None else weights[of]))


def _ndcg(blocks: _Blocks, k: int) -> float:
    has_positive = blocks.group_positives > 0
    if not has_positive.any():
        return math.nan
    discounts = np.append(0.0, np.cumsum(1 / np.log2(np.arange(k) + 2)))
    ends = blocks.before + blocks.sizes
    gained = discounts[np.minimum(ends, k)] - discounts[np.minimum(blocks.before, k)]
    gains = np.add.reduceat(gained * blocks.positives / blocks.sizes, blocks.first)
    best = discounts[np.minimum(blocks.group_positives, k)]
    return _mean(gains[has_positive] / best[has_positive], blocks, has_positive)


def _hit_rate(blocks: _Blocks, k: int) -> float:
    """A block that lies across place k has some of its places above: a draw of so many samples."""
    has_positive = blocks.group_positives > 0
    if not has_positive.any():
        return math.nan
    places = np.clip(k - blocks.before, 0, blocks.sizes)
    # probability that the places hold no positive
    missing = np.where(places == blocks.sizes, blocks.positives == 0, 1.0)
    for i in np.flatnonzero((places > 0) & (places < blocks.sizes)):
        size, positives, drawn = (int(each[i]) for each in (blocks.sizes, blocks.positives, places))
        missing[i] = math.comb(size - positives, drawn) / math.comb(size, drawn)
    missed = np.multiply.reduceat(missing, blocks.first)
    return 1 - _mean(missed[has_positive], blocks, has_positive)
