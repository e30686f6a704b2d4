"""The event recursion against time that goes on from end to end, on small random graphs."""

import numpy as np
import pytest

from pibroch.sim.kernels import events
from pibroch.sim.kernels.events import naive


def graph(seed):
    """Tasks in rising order, some on resources of whole and odd capacities, some without work."""
    rng = np.random.default_rng(seed)
    num_tasks = int(rng.integers(1, 40))
    capacity = rng.choice([0.5, 1.0, 2.0, 3.0], int(rng.integers(1, 4)))
    resource = rng.integers(-1, len(capacity), num_tasks)
    work = np.where(rng.random(num_tasks) < 0.2, 0.0, rng.choice([0.25, 1.0, 1.5], num_tasks))
    if seed % 2:  # hardly ever two ends at once
        work = work * rng.random(num_tasks)
    density = rng.random() * 0.3
    after = [
        [late for late in range(early + 1, num_tasks) if rng.random() < density]
        for early in range(num_tasks)
    ]
    return resource, work, capacity, after


def behind_delays(resource, work, after, rng):
    """Each task waits for one that shares nothing, which waits for what it waited for."""
    size = len(work)
    delays = rng.random(size)
    return (
        np.concatenate([resource, np.full(size, -1)]),
        np.concatenate([work, delays]),
        [*[[size + late for late in row] for row in after], *[[task] for task in range(size)]],
    )


def run(resource, work, capacity, bucket, after):
    begin, end = (np.full(len(work), np.nan) for _ in range(2))
    first = np.cumsum([0, *map(len, after)])
    successors = np.array([each for row in after for each in row], np.int32)
    num_done = events.run(
        resource.astype(np.int32), work, capacity, bucket, first, successors, begin, end
    )
    return num_done, begin, end


@pytest.mark.parametrize("seed", range(60))
def test_as_time_that_goes_on_from_end_to_end(seed):
    resource, work, capacity, after = graph(seed)
    bucket = np.zeros(len(capacity))
    if seed % 3 == 0:  # no two begin at once: who comes first takes what is saved up
        rng = np.random.default_rng(seed)
        bucket = rng.choice([0.0, 0.3, 2.0], len(capacity))
        resource, work, after = behind_delays(resource, work, after, rng)
    num_done, begin, end = run(resource, work, capacity, bucket, after)
    expected = naive.run(
        resource.tolist(), work.tolist(), capacity.tolist(), bucket.tolist(), after
    )
    assert num_done == len(work)
    np.testing.assert_allclose(begin, expected[0], atol=1e-9)
    np.testing.assert_allclose(end, expected[1], atol=1e-9)


def test_without_shared_resources_ends_are_sums_and_maxima():
    rng = np.random.default_rng(3)
    work = rng.random(30)
    after = [[late for late in range(n + 1, 30) if rng.random() < 0.2] for n in range(30)]
    ends = np.zeros(30)
    for n in range(30):
        before = [ends[early] for early in range(n) if n in after[early]]
        ends[n] = max(before, default=0.0) + work[n]
    _, _, end = run(np.full(30, -1), work, np.ones(1), np.zeros(1), after)
    np.testing.assert_allclose(end, ends)


def test_tasks_that_wait_for_each_other_do_not_end():
    num_done, _, end = run(np.full(3, -1), np.ones(3), np.ones(1), np.zeros(1), [[1], [0], []])
    assert num_done == 1
    assert end[2] == 1.0
    assert np.isnan(end[:2]).all()


def test_many_tasks_on_one_resource_end_in_the_order_of_their_work():
    rng = np.random.default_rng(5)
    work = rng.random(2000)
    _, _, end = run(np.zeros(2000, int), work, np.ones(1), np.zeros(1), [[] for _ in work])
    assert (np.argsort(end, kind="stable") == np.argsort(work, kind="stable")).all()
    assert end.max() == pytest.approx(work.sum())
