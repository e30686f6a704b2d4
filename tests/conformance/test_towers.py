"""The exchange by towers on declared hosts: the bits of ``alltoall``, whichever ranks share one."""

import numpy as np
import pytest
import torch

from cases import OPTIMIZERS, SHAPES, optimizers, records_of, run_steps

KIND_OF = dict(zip(OPTIMIZERS, ("jagged", "weighted", "one_hot", "weighted", "jagged"), strict=True))
HOSTS = {
    "2 x 2": (4, {"ranks_per_host": 2}),
    "4 x 1": (4, {"ranks_per_host": 1}),
    "1 x 4": (4, {"ranks_per_host": 4}),
    "K = 2": (4, {"ranks_per_host": 1, "hosts_per_tower": 2}),
    "2 + 1": (3, {"ranks_per_host": 2}),
}
HALVES = {"a": "column_wise", "b": "table_wise_pooled", "": "row_wise"}


def whole_records(results, name, shape):
    return records_of([piece for _, pieces in results for piece in pieces], SHAPES[shape], optimizers(name, shape))


def assert_same_bits(world, name, shape, **options):
    right = world.run(run_steps, name, shape, KIND_OF[name], placement="row_wise")
    results = world.run(run_steps, name, shape, KIND_OF[name], exchange="towers", **options)
    for (mine, _), (other, _) in zip(results, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), name
    assert np.array_equal(whole_records(results, name, shape), whole_records(right, name, shape)), name


@pytest.mark.parametrize("placement", ["row_wise", "table_wise", "table_wise_pooled"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_without_modules_it_has_the_bits_of_alltoall(worlds, hosts, placement):
    size, options = HOSTS[hosts]
    for name, shape in zip(OPTIMIZERS, ("shared", "odd_dims", "any", "any", "mean"), strict=True):
        assert_same_bits(worlds(size), name, shape, placement=placement, **options)
