"""How far a plan has decayed.

There is no alarm while nothing changes, and a change is seen at once.
"""

import numpy as np
import pytest

from pibroch.errors import ConfigError
from pibroch.planner.drift import DriftWatch, worst_link
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import TableSize
from pibroch.planner.profile import ProfileCounter
from pibroch.planner.topology import ClusterTopology

ROWS = 2000
BATCH = 512
ABOVE = 1.1  # a plan that costs this many times a fresh one has decayed
TABLES = [TableSize(name, ROWS, 64, 64) for name in ("a", "b")]
TOPOLOGY = ClusterTopology.of(
    {"hosts": [2, 2], "within_host": 0.01, "between_hosts": 1.0}, "the test"
)


def drawn(rng, order):
    """A batch whose hot rows are the first of an order."""
    ranks = np.minimum((rng.random((2, BATCH)) ** 6 * ROWS).astype(np.int64), ROWS - 1)
    return {"a": [order[ranks[0]]], "b": [order[ranks[1]]]}


def planned(options, rng, order):
    counter = ProfileCounter({table.name: table.num_rows for table in TABLES})
    for _ in range(300):
        counter.add(drawn(rng, order), BATCH)
    profile = counter.profile(BATCH, "first")
    return make_plan(TABLES, profile, TOPOLOGY, options)[0], profile


@pytest.mark.parametrize(
    ("mode", "steps", "of_fresh"), [("inference", 400, 1.1), ("training", 2000, 1.05)]
)
def test_a_stationary_stream_is_no_drift_and_a_shifted_one_is_within_50_batches(
    mode, steps, of_fresh
):
    rng = np.random.default_rng(1)
    options = PlanOptions(extra=0.1, mode=mode, steps=False, threshold=0.002)
    before = np.arange(ROWS)
    assignment, _ = planned(options, rng, before)
    watch = DriftWatch(assignment, TABLES, TOPOLOGY, options, BATCH)
    for step in range(1, steps + 1):
        watch.add(drawn(rng, before), BATCH)
        if step % 200 == 0:
            assert watch.look().ratio < (1 + ABOVE) / 2
    homes = assignment.home[assignment.partition_of["a"]].astype(np.int64)
    after = np.argsort(homes, kind="stable")  # what is hot now lies on one shard
    for _ in range(50):
        watch.add(drawn(rng, after), BATCH)
    decay = watch.look()
    assert decay.ratio > ABOVE
    if (
        mode == "inference"
    ):  # copies are chosen row by row: half of what the sketch knows is of the time before
        for _ in range(50):
            watch.add(drawn(rng, after), BATCH)
        decay = watch.look()
    best, _ = planned(options, rng, after)
    _, held_out = planned(options, rng, after)
    costs = [
        worst_link(each, held_out, TABLES, TOPOLOGY, mode)
        for each in (decay.assignment, best, assignment)
    ]
    assert costs[0] <= of_fresh * costs[1] and costs[2] > ABOVE * costs[1]


def test_what_it_cannot_do_is_refused():
    options = PlanOptions(steps=False)
    assignment, _ = planned(options, np.random.default_rng(1), np.arange(ROWS))
    with pytest.raises(ConfigError, match="4 shards"):
        DriftWatch(assignment, TABLES, ClusterTopology.uniform(3), options, BATCH)
    with pytest.raises(ConfigError, match="0 batches"):
        DriftWatch(assignment, TABLES, TOPOLOGY, options, BATCH).look()
