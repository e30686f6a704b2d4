import math

import numpy as np
import pytest
import torch

from pibroch.errors import ConfigError, DataError
from pibroch.metrics import MOST_KEPT, StreamingMetrics
from pibroch.train.metrics import Predictions


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator) * 2 - 1
    return logits, (torch.rand(count, generator=generator) < torch.sigmoid(logits * 0.7)).float()


def exact(logits, labels):
    existing = Predictions()
    existing.add(logits.numpy(), labels.numpy())
    return existing.result().metrics


def assert_same(actual, want, auc=1e-12):
    assert actual.auc == pytest.approx(want.auc, abs=auc)
    assert actual.num_samples == want.num_samples
    for name in ("logloss", "normalized_entropy", "calibration"):
        assert getattr(actual, name) == pytest.approx(getattr(want, name), rel=1e-6)


def test_figures_are_the_exact_ones():
    logits, labels = draw(20_000, 0)
    metrics = StreamingMetrics()
    for part in torch.arange(20_000).split(1536):
        metrics.add(logits[part][:, None].requires_grad_(), labels[part])
    result = metrics.compute()["label"]
    assert_same(result.lifetime, exact(logits, labels))
    assert result.window == result.lifetime


def test_the_window_holds_the_latest_samples():
    metrics = StreamingMetrics(window=8000)
    batches = [draw(500, seed) for seed in range(40)]
    for place, (logits, labels) in enumerate(batches):
        metrics.add(logits, labels)
        result = metrics.compute()["label"]
        assert result.lifetime.num_samples == 500 * (place + 1)
        if place >= 15:
            assert 7000 <= result.window.num_samples <= 8000
            latest = batches[place + 1 - result.window.num_samples // 500 : place + 1]
            assert_same(
                result.window,
                exact(*(torch.cat(each) for each in zip(*latest, strict=True))),
            )
    metrics.reset()
    assert metrics.compute()["label"].lifetime.num_samples == 0


def test_tasks_have_their_own_samples():
    logits, labels = draw(300, 1)
    others = draw(300, 2)
    mask = torch.arange(300) % 3 > 0
    labels_with_gaps = torch.where(mask, others[1], torch.nan)
    metrics = StreamingMetrics(["click", "buy"])
    weights = {"click": None, "buy": mask.float()}
    metrics.add(
        {"click": logits, "buy": others[0]}, {"click": labels, "buy": labels_with_gaps}, weights
    )
    result = metrics.compute()
    assert_same(result["click"].lifetime, exact(logits, labels))
    assert_same(result["buy"].lifetime, exact(others[0][mask], others[1][mask]))


def test_a_weight_of_two_is_a_sample_twice():
    logits, labels = draw(200, 3)
    weighted = StreamingMetrics()
    twice = StreamingMetrics()
    weighted.add(logits, labels, torch.full((200,), 2.0))
    twice.add(torch.cat([logits, logits]), torch.cat([labels, labels]))
    one = weighted.compute()["label"].lifetime
    other = twice.compute()["label"].lifetime
    assert one.num_samples == 200 and other.num_samples == 400
    assert (one.auc, one.logloss, one.calibration) == pytest.approx(
        (other.auc, other.logloss, other.calibration)
    )


def test_nothing_and_one_kind_only_are_nan():
    metrics = StreamingMetrics()
    empty = metrics.compute()["label"].lifetime
    assert math.isnan(empty.auc) and math.isnan(empty.logloss) and empty.num_samples == 0
    metrics.add(torch.zeros(0), torch.zeros(0))
    metrics.add([100.0, -100.0, 0.0], [0, 0, 0])
    result = metrics.compute()["label"].lifetime
    assert (
        math.isnan(result.auc)
        and math.isnan(result.normalized_entropy)
        and math.isnan(result.calibration)
    )
    assert result.logloss == pytest.approx((100 + math.log(2)) / 3)


def normal(generator, batch, labels):
    return generator.normal(size=len(labels)) + 0.8 * labels


STREAMS = {
    "ordinary": normal,
    "hardly apart": lambda *given: normal(*given) * 3e-3 - 3,
    "rare clicks": lambda *given: normal(*given) * 2 - 20,
    "huge": lambda *given: normal(*given) * 1e300,
    "spreading and moving": lambda r, batch, y: normal(r, batch, y) * (1 + batch) + 10 * batch,
    "narrowing": lambda r, batch, y: normal(r, batch, y) / (1 + batch),
    "mostly one value": lambda r, batch, y: np.where(
        r.random(len(y)) < 0.6, 0, normal(r, batch, y)
    ),
    "in order": lambda r, batch, y: np.sort(normal(r, batch, y)) + batch,
}


@pytest.mark.parametrize("name", STREAMS)
def test_auc_of_many_different_logits_is_close_in_bounded_memory(name):
    """Logits are float64 here, nearly all of them different."""
    generator = np.random.default_rng(7)
    metrics = StreamingMetrics(window=160_000)
    seen = []
    for batch in range(60):
        labels = (generator.random(4096) < 0.2).astype(np.float64)
        seen.append((STREAMS[name](generator, batch, labels), labels))
        metrics.add(*seen[-1])
    actual = metrics.compute()["label"]
    for got, count in ((actual.lifetime, 60 * 4096), (actual.window, actual.window.num_samples)):
        logits, labels = (np.concatenate(each)[-count:] for each in zip(*seen, strict=True))
        ranks = np.argsort(np.argsort(logits)) if name != "mostly one value" else logits
        want = exact(torch.from_numpy(ranks), torch.from_numpy(labels))
        assert got.auc == pytest.approx(want.auc, abs=1e-4)
        assert got.num_samples == count
    curves = [metrics._before["label"], *(part.curve for part in metrics._parts["label"])]
    assert all(curve.rows().shape[1] <= MOST_KEPT for curve in curves)


def test_logits_of_any_size_are_told_apart():
    metrics = StreamingMetrics()
    metrics.add(np.array([-1e30, -16.0, 16.0, 1e30]), np.array([0.0, 0, 1, 1]))
    assert metrics.compute()["label"].lifetime.auc == 1.0
    metrics.reset()
    metrics.add(np.array([2.0, 2.0 + 1e-9, -20.0, -21.0]), np.array([0.0, 1, 1, 0]))
    assert metrics.compute()["label"].lifetime.auc == 0.75


@pytest.mark.parametrize(
    ("logits", "labels", "weights", "message"),
    [
        (torch.zeros(3), torch.zeros(2), None, "3 logits, 2 labels"),
        (torch.zeros(2, 2), torch.zeros(4), None, r"logits \[2, 2\]"),
        (torch.tensor(1.0), torch.zeros(1), None, r"logits \[\]"),
        (torch.tensor([torch.nan]), torch.zeros(1), None, "a logit that is no finite number"),
        (torch.zeros(1), torch.tensor([2.0]), None, "a label outside 0 to 1"),
        (torch.zeros(1), torch.zeros(1), torch.tensor([-1.0]), "a weight below 0"),
        ({"other": torch.zeros(1)}, torch.zeros(1), None, "without task 'label'"),
    ],
)
def test_bad_predictions_are_refused_and_leave_no_trace(logits, labels, weights, message):
    metrics = StreamingMetrics()
    with pytest.raises(DataError, match=message):
        metrics.add(logits, labels, weights)
    assert metrics.compute()["label"].lifetime.num_samples == 0


def test_bad_tasks_and_windows_are_refused():
    for tasks in ([], "click", ["a", "a"]):
        with pytest.raises(ConfigError, match="distinct names"):
            StreamingMetrics(tasks)
    with pytest.raises(ConfigError, match="a window of 3 samples"):
        StreamingMetrics(window=3)
    both = StreamingMetrics(["a", "b"])
    with pytest.raises(DataError, match="a dictionary by task"):
        both.add(torch.zeros(1), torch.zeros(1))
    with pytest.raises(DataError, match="without task 'b'"):
        both.add({"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.zeros(1)})
    assert both.compute()["a"].lifetime.num_samples == 0
