"""Losses against their definitions in NumPy, and the gradients of those that rank."""

import numpy as np
import pytest
import torch

from pibroch.config.loss import FocalConfig, PairwiseConfig, SoftmaxConfig, SquaredErrorConfig
from pibroch.models import Focal, GroupSoftmax, Pairwise, SquaredError, ranking_losses

RNG = np.random.default_rng(4)
LOGITS = RNG.normal(size=40)
CLICKS = (RNG.random(40) < 0.4).astype(np.float64)
RATINGS = RNG.integers(0, 4, 40).astype(np.float64)
WEIGHTS = RNG.choice([0.0, 0.5, 2.0], 40)
GROUPS = RNG.integers(-3, 9, 40)


@pytest.mark.parametrize("alpha", [None, 0.25])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_focal_is_its_equation(alpha, gamma, is_weighted):
    p = 1 / (1 + np.exp(-LOGITS))
    p_t = np.where(CLICKS == 1, p, 1 - p)
    share = 1 if alpha is None else np.where(CLICKS == 1, alpha, 1 - alpha)
    want = -share * (1 - p_t) ** gamma * np.log(p_t) * (WEIGHTS if is_weighted else 1)
    weights = torch.from_numpy(WEIGHTS) if is_weighted else None
    loss = Focal(FocalConfig(alpha=alpha, gamma=gamma))
    got = loss(torch.from_numpy(LOGITS), torch.from_numpy(CLICKS), weights)
    assert got.item() == pytest.approx(want.mean(), rel=1e-12)


def slope_of_focal(logits, labels, gamma):
    """Of each sample by its logit: ``-gamma (1-p)^gamma p log p - (1-p)^(1+gamma)`` of clicks."""
    z = np.where(labels == 1, logits, -logits).astype(np.float128)
    log_p, log_missed = -np.logaddexp(0, -z), -np.logaddexp(0, z)
    slopes = gamma * np.exp(gamma * log_missed + log_p) * log_p - np.exp((1 + gamma) * log_missed)
    return np.where(labels == 1, slopes, -slopes).astype(np.float64)


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_slope_of_focal_is_finite_and_right_however_well_a_sample_is_predicted(gamma, dtype):
    sizes = [0.0, 1e-3, 3.0, 16.0, 17.0, 80.0, 95.0, 104.0, 800.0, 1e30]
    values = np.array([sign * size for sign in (1, -1) for size in sizes])
    for label in (0.0, 1.0):
        logits = torch.tensor(values, dtype=dtype, requires_grad=True)
        labels = torch.full_like(logits, label)
        Focal(FocalConfig(gamma=gamma))(logits, labels).backward()
        want = slope_of_focal(logits.detach().numpy(), np.full(len(values), label), gamma)
        got = logits.grad.numpy() * len(values)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-37)


def test_squared_error_is_weighted():
    loss = SquaredError(SquaredErrorConfig())
    tensors = [torch.from_numpy(each) for each in (LOGITS, RATINGS, WEIGHTS)]
    want = (LOGITS - RATINGS) ** 2
    assert loss(*tensors[:2]).item() == pytest.approx(want.mean())
    assert loss(*tensors).item() == pytest.approx((want * WEIGHTS).mean())


def pairwise(logits, labels, weights, groups):
    loss = total = 0.0
    for i in range(len(logits)):
        for j in range(len(logits)):
            if groups[i] == groups[j] and labels[i] > labels[j]:
                loss += weights[i] * np.log1p(np.exp(logits[j] - logits[i]))
                total += weights[i]
    return loss / total if total else 0.0


def softmax(logits, labels, weights, groups):
    loss = total = 0.0
    for group in set(groups.tolist()):
        of = groups == group
        if of.sum() < 2 or not (labels * weights)[of].sum():
            continue
        share = (labels * weights)[of] / (labels * weights)[of].sum()
        weight = (labels * weights)[of].sum() / labels[of].sum()
        shares = np.exp(logits[of]) / np.exp(logits[of]).sum()
        loss -= weight * (share * np.log(shares)).sum()
        total += weight
    return loss / total if total else 0.0


CASES = [(Pairwise(PairwiseConfig()), pairwise), (GroupSoftmax(SoftmaxConfig()), softmax)]


@pytest.mark.parametrize(("loss", "equation"), CASES)
@pytest.mark.parametrize("labels", [CLICKS, RATINGS, np.zeros(40)])
@pytest.mark.parametrize("groups", [GROUPS, np.zeros(40, np.int64), np.arange(40)])
def test_ranking_losses_are_their_equations(monkeypatch, loss, equation, labels, groups):
    monkeypatch.setattr(ranking_losses, "BLOCK_ROWS", 7)
    value, gradient = loss.of_batch(LOGITS, labels, WEIGHTS, groups)
    assert value == pytest.approx(equation(LOGITS, labels, WEIGHTS, groups), rel=1e-12)
    for i in range(0, 40, 3):
        step = np.zeros(40)
        step[i] = 1e-6
        ends = [equation(LOGITS + sign * step, labels, WEIGHTS, groups) for sign in (1, -1)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)
