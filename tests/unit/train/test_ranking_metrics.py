"""Figures by group against all orders, pair by pair."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.train.metrics import average_precision
from pibroch.train.ranking_metrics import ranking_figures

samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-2, 2), st.booleans()), min_size=1, max_size=12
)


def orders(logits):
    """All orders, best first, that break ties in some way."""
    return [
        order
        for order in itertools.permutations(range(len(logits)))
        if all(logits[a] >= logits[b] for a, b in itertools.pairwise(order))
    ]


def plain(logits, labels, groups, k):
    areas, gains, hits = [], [], []
    for group in sorted(set(groups)):
        of = [i for i, each in enumerate(groups) if each == group]
        scores = [logits[i] for i in of]
        truths = [labels[i] for i in of]
        pairs = [
            (scores[a] > scores[b]) + 0.5 * (scores[a] == scores[b])
            for a in range(len(of))
            for b in range(len(of))
            if truths[a] and not truths[b]
        ]
        if pairs:
            areas.append((np.mean(pairs), len(of)))
        if any(truths):
            best = sum(1 / math.log2(place + 2) for place in range(min(k, sum(truths))))
            dcg = [
                sum(truths[i] / math.log2(place + 2) for place, i in enumerate(order[:k]))
                for order in orders(scores)
            ]
            gains.append(np.mean(dcg) / best)
            hits.append(np.mean([any(truths[i] for i in order[:k]) for order in orders(scores)]))
    gauc = sum(a * n for a, n in areas) / sum(n for _, n in areas) if areas else math.nan
    return [gauc, np.mean(gains) if gains else math.nan, np.mean(hits) if hits else math.nan]


@settings(max_examples=60, deadline=None)
@given(samples, st.integers(1, 4))
def test_figures_are_means_over_orders_of_ties(rows, k):
    groups, logits, labels = zip(*rows, strict=True)
    if max(groups.count(group) for group in set(groups)) > 6:
        return  # too many orders
    arrays = np.array(logits, np.float32), np.array(labels), np.array(groups)
    figures = ranking_figures(*arrays, [k])
    want = plain(logits, labels, groups, k)
    assert list(figures) == ["gauc", f"ndcg@{k}", f"hr@{k}"]
    assert list(figures.values()) == pytest.approx(want, nan_ok=True, abs=1e-12)
    shuffled = np.random.default_rng(0).permutation(len(rows))
    assert ranking_figures(*(each[shuffled] for each in arrays), [k]) == pytest.approx(
        figures, nan_ok=True, abs=1e-12
    )


def test_no_samples_say_nothing():
    nothing = np.empty(0, np.float32), np.empty(0, bool), np.empty(0, np.int64)
    assert all(math.isnan(value) for value in ranking_figures(*nothing, [3]).values())
    assert math.isnan(average_precision(np.array([0, 2]), np.array([0, 0])))
