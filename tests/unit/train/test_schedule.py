import pytest

from pibroch.config.optimizer import ScheduleConfig
from pibroch.state.monitor import Monitor
from pibroch.train.optimizers import learning_rate_factor


def factors(total_steps, **settings):
    return [
        learning_rate_factor(ScheduleConfig(**settings), s, total_steps)
        for s in range(1, total_steps + 1)
    ]


def test_constant_with_warm_up():
    assert factors(5, warmup_steps=2) == [0.5, 1, 1, 1, 1]


def test_cosine_falls_to_its_end_and_stays():
    values = factors(8, name="cosine", decay_steps=4, final_factor=0.2)
    assert values == pytest.approx([0.8828, 0.6, 0.3172, 0.2, 0.2, 0.2, 0.2, 0.2], abs=1e-4)


def test_linear_spans_the_run_when_nothing_is_said():
    assert factors(4, name="linear") == [0.75, 0.5, 0.25, 0]


def test_step_drops():
    assert factors(5, name="step", step_every=2, step_factor=0.5) == [1, 0.5, 0.5, 0.25, 0.25]


def test_monitor_counts_what_did_not_improve():
    monitor = Monitor()
    assert [monitor.update(i, v) for i, v in enumerate([0.5, 0.5, float("nan"), 0.6, 0.1])] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert (monitor.best_step, monitor.evaluations_since_best, monitor.plateaus) == (3, 1, 2)
    assert (
        monitor.is_exhausted(1) and not monitor.is_exhausted(2) and not monitor.is_exhausted(None)
    )
