import numpy as np
import pytest

from pibroch.kernels import parallel
from pibroch.kernels.fill import fill_normal, fill_uniform


def test_ranges_cover_everything_once():
    hits = np.zeros(10_000, np.int64)

    def count(hits, start, stop):
        hits[start:stop] += 1

    parallel.run(count, 10_000, hits, grain=100)
    assert (hits == 1).all()


def test_an_error_in_another_thread_reaches_the_caller():
    def fail(start, stop):
        if start > 0:
            raise ValueError(f"range {start}")

    with pytest.raises(ValueError, match="range 5"):
        parallel.run_ranges(fail, [0, 5, 10])


def test_fills_depend_on_the_element_alone():
    whole = np.empty((100, 7), np.float32)
    part = np.empty((20, 7), np.float32)
    for fill, number in ((fill_uniform, 0.5), (fill_normal, 2.0)):
        fill(whole, np.arange(100), 9, number)
        fill(part, np.arange(60, 100, 2), 9, number)
        assert np.array_equal(whole[60::2], part)


def test_fills_have_their_distribution():
    weights = np.empty((20_000, 10), np.float32)
    fill_uniform(weights, np.arange(20_000), 1, 0.5)
    assert abs(weights.mean()) < 0.005
    assert -0.5 <= weights.min() < -0.4999 < 0.4999 < weights.max() <= 0.5
    fill_normal(weights, np.arange(20_000), 1, 2.0)
    assert abs(weights.std() - 2.0) < 0.02
    assert abs(weights.mean()) < 0.02
