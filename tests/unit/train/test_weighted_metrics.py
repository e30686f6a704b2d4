"""Figures of samples that have weights: as scikit-learn's, and as of copies of samples."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.data.schema import Target
from pibroch.train.metrics import Predictions
from pibroch.train.ranking_metrics import ranking_figures

TARGETS = {"click": Target(), "seconds": Target(kind="number")}


def drawn(count=400):
    """Logits with ties, labels, groups, and weights of which some are 0."""
    rng = np.random.default_rng(11)
    logits = np.round(rng.normal(size=(count, 2)), 1).astype(np.float32)
    clicks = rng.random(count) < 1 / (1 + np.exp(-logits[:, 0]))
    labels = np.stack([clicks, rng.normal(size=count)], 1).astype(np.float32)
    weights = rng.choice([0.0, 0.25, 1.0, 10.0], count).astype(np.float32)
    return logits, labels, rng.integers(-3, 30, count), weights


def tasks_of(*columns, order=None, batch=77, targets=TARGETS):
    predictions = Predictions(targets, top=(3,))
    columns = [each if order is None else each[order] for each in columns]
    for first in range(0, len(columns[0]), batch):
        predictions.add(*(each[first : first + batch] for each in columns))
    return predictions.result()


def test_figures_are_those_of_scikit_learn():
    """Of 1.9.1, with the weights as ``sample_weight``, and without."""
    tasks = tasks_of(*drawn()).tasks
    right = {
        "click": {
            "auc": (0.648042074011222, 0.7284478447844784),
            "logloss": (0.6721094500782274, 0.6115637693086954),
            "pr_auc": (0.6620663837808162, 0.7098326262271621),
        },
        "seconds": {
            "rmse": (1.528020868732539, 1.4542381760510772),
            "mae": (1.2083950494832674, 1.137306277390744),
        },
    }
    for label, figures in right.items():
        for name, values in figures.items():
            got = tasks[label][name], tasks[label][f"{name}_unweighted"]
            assert got == pytest.approx(values, rel=1e-9), name


def test_calibration_and_entropy_by_their_definitions():
    logits, labels, _, weights = drawn()
    evaluation = tasks_of(logits, labels, drawn()[2], weights)
    clicks, wide = labels[:, 0], weights.astype(np.float64)
    predicted = 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
    rate = (wide @ clicks) / wide.sum()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    metrics = evaluation.metrics
    assert metrics.calibration == pytest.approx(wide @ predicted / (wide @ clicks), rel=1e-12)
    assert metrics.normalized_entropy == pytest.approx(metrics.logloss / entropy, rel=1e-12)
    assert metrics.num_samples == 400
    area = np.trapezoid(evaluation.curves.true_positive_rate, evaluation.curves.false_positive_rate)
    assert area == pytest.approx(metrics.auc, abs=2e-3)


samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-2, 2), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(samples)
def test_a_sample_of_weight_n_is_n_samples(rows):
    """But for places, which have no weights."""
    groups, logits, labels, weights = (np.array(each) for each in zip(*rows, strict=True))
    columns = logits.astype(np.float32), labels.astype(np.float32), groups
    one = {"click": Target()}
    got = tasks_of(*columns, weights.astype(np.float32), targets=one)
    copied = tasks_of(*(np.repeat(each, weights) for each in columns), targets=one)
    once = tasks_of(*columns, targets=one)
    for name, right in copied.tasks["click"].items():
        if name[:2] not in ("nd", "hr"):
            assert got.tasks["click"][name] == pytest.approx(right, rel=1e-9, nan_ok=True), name
    for name, right in once.tasks["click"].items():
        assert got.tasks["click"][f"{name}_unweighted"] == pytest.approx(right, nan_ok=True)


def test_a_group_weighs_the_mean_of_its_samples():
    logits = np.array([3, 2, 1, 9, 8], np.float32)
    labels = np.array([False, True, False, True, False])
    groups = np.array([1, 1, 1, 2, 2])
    weights = np.array([1.0, 4.0, 1.0, 5.0, 3.0])
    figures = ranking_figures(logits, labels, groups, [1, 2], weights)
    second = 1 / math.log2(3)
    assert figures["ndcg@1"] == pytest.approx(4 / (2 + 4))
    assert figures["hr@1"] == pytest.approx(4 / (2 + 4))
    assert figures["ndcg@2"] == pytest.approx((2 * second + 4) / 6)
    assert figures["gauc"] == pytest.approx((6 * 0.5 + 8 * 1.0) / 14)


def test_no_bit_depends_on_the_order_in_which_samples_come():
    """As it does on the number of ranks."""
    columns = drawn()
    right = tasks_of(*columns)
    order = np.random.default_rng(2).permutation(400)
    got = tasks_of(*columns, order=order, batch=400)
    exact = [name for name in right.tasks["click"] if not name.startswith("logloss_un")]
    exact = [name for name in exact if not name.startswith("normalized_entropy_un")]
    assert {name: got.tasks["click"][name] for name in exact} == {
        name: right.tasks["click"][name] for name in exact
    }


def test_nothing_of_any_weight_is_undefined():
    logits, labels, groups, weights = drawn(20)
    tasks = tasks_of(logits, labels, groups, weights * 0).tasks
    for figures in tasks.values():
        for name, value in figures.items():
            assert math.isnan(value) == (not name.endswith("_unweighted")), name
