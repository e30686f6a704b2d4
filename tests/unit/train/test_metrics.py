import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from pibroch.train.metrics import Predictions

logits_and_labels = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=60)


def collected(logits, labels, batch=7):
    predictions = Predictions()
    for start in range(0, len(labels), batch):
        predictions.add(logits[start : start + batch], labels[start : start + batch])
    result = predictions.result()
    return result.metrics, result.curves


@settings(max_examples=60, deadline=None)
@given(logits_and_labels)
def test_auc_equals_torchmetrics_ties_included(samples):
    logits = np.array([logit for logit, _ in samples], np.float32)
    labels = np.array([label for _, label in samples], np.float32)
    auc = collected(logits, labels)[0].auc
    if labels.min() == labels.max():
        assert math.isnan(auc)
    else:
        expected = binary_auroc(
            torch.sigmoid(torch.from_numpy(logits)).double(), torch.from_numpy(labels).long()
        )
        assert auc == pytest.approx(expected.item(), abs=1e-6)


def test_figures_against_their_definitions():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=5000).astype(np.float32)
    probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
    labels = (rng.random(5000) < probability).astype(np.float32)
    metrics, curves = collected(logits, labels, batch=999)
    logloss = -np.mean(np.where(labels > 0, np.log(probability), np.log(1 - probability)))
    rate = labels.mean(dtype=np.float64)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert metrics.logloss == pytest.approx(logloss, rel=1e-12)
    assert metrics.normalized_entropy == pytest.approx(logloss / entropy, rel=1e-12)
    assert metrics.calibration == pytest.approx(probability.sum() / labels.sum(), rel=1e-12)
    assert metrics.num_samples == 5000
    assert curves.false_positive_rate[0] == 0 and curves.true_positive_rate[-1] == 1
    area = np.trapezoid(curves.true_positive_rate, curves.false_positive_rate)
    assert area == pytest.approx(metrics.auc, abs=2e-3)
    assert np.mean(curves.predicted) == pytest.approx(probability.mean(), rel=1e-9)
    assert np.mean(curves.observed) == pytest.approx(rate, rel=1e-9)


def test_huge_logits_stay_finite_and_empty_input_is_undefined():
    metrics, _ = collected(np.array([1e4, -1e4], np.float32), np.array([0.0, 1.0], np.float32))
    assert metrics.auc == 0 and metrics.logloss == pytest.approx(1e4)
    assert math.isnan(Predictions().result().metrics.logloss)
