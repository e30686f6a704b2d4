"""What a plan is predicted to send from rank to rank, beside what a run counts."""

from itertools import count

import numpy as np
import pytest

import cases
import pibroch as pb
from pibroch.data import EncodedDataset
from pibroch.planner.count import CountOptions, count_dataset
from pibroch.planner.payload import step_payload
from row_plans import random_plan
from small_run import make_dataset

STEPS = 50
PER_RANK = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(
        tmp_path_factory.mktemp("data") / "small", num_samples=20_000, max_table_rows=300
    )


@pytest.mark.parametrize("replicas", ["gather", "sparse", "dense"])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_each_link_are_predicted(worlds, data, size, replicas):
    dataset = EncodedDataset.open(data)
    tables = [pb.Table(name, rows, 8) for name, rows in dataset.num_rows.items()]
    profile = count_dataset(dataset, CountOptions(PER_RANK))
    of_larger = count_dataset(dataset, CountOptions(4 * PER_RANK))
    drawn = (random_plan(tables, size, seed, copies=True) for seed in count())
    copying = next(plan for plan in drawn if plan.copies(tables[0]))
    for plan in (pb.Plan.of(tables, size), copying):
        counted = worlds(size).run(cases.count_sent, data, plan, replicas, STEPS, PER_RANK)
        predicted = STEPS * step_payload(plan, tables, profile, replicas=replicas)
        np.testing.assert_allclose(predicted, np.array(counted), rtol=0.02)
        from_larger = step_payload(plan, tables, of_larger, replicas=replicas, batch_size=PER_RANK)
        np.testing.assert_allclose(STEPS * from_larger, np.array(counted), rtol=0.02)
