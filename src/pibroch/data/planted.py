"""A click model with planted effects, and the best that any model can do on what it generates.

The logit of a sample comes from effects of its ids and numbers,

    logit = b + Σ_j w_j z_j + Σ_f w_f + Σ_{f<g} <u_f, u_g>

over the 13 standardised dense values z and the 26 categories (w, u of the id's row; of several ids
the sum over the bag's mean length). That is a factorisation machine, so linear terms alone do not
reach the optimum. Only Criteo's smaller tables have u ≠ 0, and rare ids have small effects: what is
seen a few times cannot be learned.

With planted groups all features of one share a direction, u = a(id) · d_group, orthogonal to those
of other groups: |cos| of two features is 1 inside a group and 0 between groups. What a group adds
to the logit is one number, which a tower of its features can pass on, and pairs weigh more than
linear terms.

Legend: R samples, F categories, n dense, K factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.click_model import sums

NUM_FACTORS = 2
CLICK_RATE = 0.2566
"""Of the Criteo sample."""

DEVIATIONS = 1.15, 0.5
"""Of the linear and the pair part of logits."""
GROUPED_DEVIATIONS = 0.5, 1.0
"""The same with planted groups, which pairs alone tell."""
_LEARNABLE_SAMPLES = 200_000
_HALF_EFFECT_COUNT = 400
_NUM_BINS = 1 << 17
_LIMIT = 16.0
"""Logits beyond it count as it."""


@dataclass(frozen=True, slots=True)
class Planted:
    """The planted effects.

    Attributes:
        first_row: of each table in ``effects``, int64 ``[F]``.
        effects: float32 ``[all rows, 1 + K]``: w, then u; with planted groups K is their number,
            and u has one column of its group's alone.
        bag_scale: weight of one id of each feature, float32 ``[F]``.
        dense_effects: float32 ``[n]``: w.
        dense_mean: of the dense values, float32 ``[n]``.
        dense_scale: one over their standard deviation, float32 ``[n]``.
        linear_scale: weight of the sum of all w.
        pair_scale: weight of the sum over pairs.
        bias: b.
    """

    first_row: NDArray[np.int64]
    effects: NDArray[np.float32]
    bag_scale: NDArray[np.float32]
    dense_effects: NDArray[np.float32]
    dense_mean: NDArray[np.float32]
    dense_scale: NDArray[np.float32]
    linear_scale: float = 1.0
    pair_scale: float = 1.0
    bias: float = 0.0

    def parts(
        self, dense: NDArray[np.float32], ids: NDArray[np.int32], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The unscaled linear and pair sums, float64 ``[R]`` each.

        Args:
            dense: ``[R, n]``.
            ids: ``[V]`` sample-major: all ids of sample 0, feature by feature, then of sample 1,
                ...
            starts: first id of each bag, ``[R * F + 1]``.
        """
        linear = np.empty(len(dense))
        pairs = np.empty(len(dense))
        standard = (dense - self.dense_mean) * self.dense_scale
        sums(
            standard,
            ids,
            starts,
            self.first_row,
            self.effects,
            self.bag_scale,
            self.dense_effects,
            linear,
            pairs,
        )
        return linear, pairs

    def logits(
        self, dense: NDArray[np.float32], ids: NDArray[np.int32], starts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """True logits, float64 ``[R]``; arguments as for :meth:`parts`."""
        linear, pairs = self.parts(dense, ids, starts)
        return self.bias + self.linear_scale * linear + self.pair_scale * pairs


def draw_effects(
    probabilities: NDArray[np.float64],
    in_pairs: bool,
    rng: np.random.Generator,
    group: tuple[int, int] | None = None,
) -> NDArray[np.float32]:
    """Effects of one table's rows with these access probabilities, float32 ``[rows, 1 + K]``.

    All K numbers are 0 unless ``in_pairs``.

    Args:
        probabilities: of the rows.
        in_pairs: whether the feature interacts with others.
        rng: draws.
        group: of the feature, and how many there are, then K: features of different groups do not
            interact, as their u are orthogonal. All interact when absent.
    """
    expected = probabilities * _LEARNABLE_SAMPLES
    shrinkage = expected / (expected + _HALF_EFFECT_COUNT)
    drawn: NDArray[np.float64] = (
        rng.standard_normal((len(probabilities), 1 + NUM_FACTORS)) * shrinkage[:, None]
    )
    if group is None:
        return (drawn if in_pairs else drawn * [1.0, *[0.0] * NUM_FACTORS]).astype(np.float32)
    number, count = group
    effects = np.zeros((len(probabilities), 1 + count), np.float32)
    effects[:, 0] = drawn[:, 0]
    if in_pairs:
        effects[:, 1 + number] = drawn[:, 1]
    return effects


def calibrated(
    linear: NDArray[np.float64],
    pairs: NDArray[np.float64],
    deviations: tuple[float, float] = DEVIATIONS,
    others: NDArray[np.float64] | float = 0.0,
) -> tuple[float, float, float]:
    """Scales of the linear and the pair part, and the click rate's bias, from a pilot.

    ``others`` is what else is in its logits.
    """
    linear_scale, pair_scale = (
        wanted / float(part.std()) for wanted, part in zip(deviations, (linear, pairs), strict=True)
    )
    raw = linear_scale * linear + pair_scale * pairs + others
    low = -50.0
    high = 50.0
    for _ in range(60):
        bias = (low + high) / 2
        low, high = (bias, high) if sigmoid(raw + bias).mean() < CLICK_RATE else (low, bias)
    return linear_scale, pair_scale, (low + high) / 2


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of logits."""
    return 1.0 / (1.0 + np.exp(-logits))


class TruthMeter:
    """Metrics of a model that knows the true logits.

    Ranks by a fine histogram of logits (ties inside a bin of 0.00024 count half), so its AUC is
    exact to about 1e-8.
    """

    def __init__(self) -> None:
        self._clicks = np.zeros(_NUM_BINS)
        self._others = np.zeros(_NUM_BINS)
        self._expected_clicks = np.zeros(_NUM_BINS)
        self._expected_others = np.zeros(_NUM_BINS)
        self._loss = self._expected_loss = 0.0

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.uint8]) -> None:
        """Count samples with true logits ``[R]`` and drawn labels ``[R]``."""
        bins = np.clip((logits + _LIMIT) * (_NUM_BINS / (2 * _LIMIT)), 0, _NUM_BINS - 1).astype(
            np.int64
        )
        probabilities = sigmoid(logits)
        for total, weights in (
            (self._clicks, labels),
            (self._others, 1 - labels),
            (self._expected_clicks, probabilities),
            (self._expected_others, 1 - probabilities),
        ):
            total += np.bincount(bins, weights, _NUM_BINS)
        softplus = np.logaddexp(0.0, logits)
        self._loss += float((softplus - labels * logits).sum())
        self._expected_loss += float((softplus - probabilities * logits).sum())

    @property
    def num_samples(self) -> int:
        """So far."""
        return int(self._clicks.sum() + self._others.sum())

    def metrics(self) -> dict[str, float]:
        """``auc``, ``logloss`` on drawn labels, ``expected_*`` over all draws, ``click_rate``."""
        count = self.num_samples
        if not count:
            return {}
        return {
            "auc": _auc(self._clicks, self._others),
            "expected_auc": _auc(self._expected_clicks, self._expected_others),
            "logloss": float(self._loss / count),
            "expected_logloss": float(self._expected_loss / count),
            "click_rate": float(self._clicks.sum() / count),
        }


def _auc(clicks: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Chance that a click ranks above a non-click, from their histograms over the same bins.

    >>> _auc(np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 0.0]))
    0.875
    """
    pairs = clicks.sum() * others.sum()
    below = np.cumsum(others) - others
    return float((clicks * (below + 0.5 * others)).sum() / pairs) if pairs else 0.5
