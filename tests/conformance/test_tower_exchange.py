"""The exchange by towers on declared hosts: the bits of ``alltoall``, whichever ranks share one."""

import numpy as np
import pytest
import torch

import cases
from cases import OPTIMIZERS, SHAPES, optimizers, records_of, run_steps

KIND_OF = dict(
    zip(OPTIMIZERS, ("jagged", "weighted", "one_hot", "weighted", "jagged"), strict=True)
)
HOSTS = {
    "2 x 2": (4, {"ranks_per_host": 2}),
    "4 x 1": (4, {"ranks_per_host": 1}),
    "1 x 4": (4, {"ranks_per_host": 4}),
    "K = 2": (4, {"ranks_per_host": 1, "hosts_per_tower": 2}),
    "2 + 1": (3, {"ranks_per_host": 2}),
}


def whole_records(results, name, shape):
    return records_of(
        [piece for _, pieces in results for piece in pieces], SHAPES[shape], optimizers(name, shape)
    )


def assert_same_bits(world, name, shape, **options):
    right = world.run(run_steps, name, shape, KIND_OF[name], placement="row_wise")
    results = world.run(run_steps, name, shape, KIND_OF[name], exchange="towers", **options)
    for (actual, _), (other, _) in zip(results, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True)), name
    assert np.array_equal(whole_records(results, name, shape), whole_records(right, name, shape)), (
        name
    )


@pytest.mark.parametrize("placement", ["row_wise", "table_wise", "table_wise_pooled"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_without_modules_it_has_the_bits_of_alltoall(worlds, hosts, placement):
    size, options = HOSTS[hosts]
    for name, shape in (("sgd", "shared"), ("row_wise_adagrad", "mean"), ("adam", "any")):
        assert_same_bits(worlds(size), name, shape, placement=placement, **options)


def test_columns_of_a_table_may_lie_on_the_ranks_of_its_tower(worlds):
    """Equal bits where the contract promises them: not under row-wise optimizers."""
    for name in ("sgd", "adagrad"):
        assert_same_bits(worlds(4), name, "shared", placement="column_wise", ranks_per_host=2)


@pytest.mark.parametrize(
    "options", [HOSTS["1 x 4"], HOSTS["2 x 2"], HOSTS["2 + 1"]], ids=["1 x 4", "2 x 2", "2 + 1"]
)
def test_bags_of_rows_on_several_ranks_may_be_reduced_and_scattered(worlds, options):
    """Forward within 1e-6 and records to rounding, as parts of a bag are added in another order."""
    (size, hosts) = options
    for name, shape in (
        ("sgd", "shared"),
        ("row_wise_adagrad", "mean"),
        ("adam", "any"),
        ("sgd", "odd_dims"),
    ):
        kind = KIND_OF[name]
        right = worlds(size).run(run_steps, name, shape, kind, placement="row_wise")
        actual = worlds(size).run(
            run_steps, name, shape, kind, exchange="towers", placement="row_wise_pooled", **hosts
        )
        for (own, _), (other, _) in zip(actual, right, strict=True):
            for a, b in zip(own, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        records = [whole_records(results, name, shape) for results in (actual, right)]
        np.testing.assert_allclose(*records, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_it_has_the_bits_of_the_strong_baseline_on_the_same_wire(worlds, wire):
    """Vectors are rounded once, on their way between hosts; numbers may be compressed besides."""
    options = {"placement": "table_wise_pooled", "wire": wire}
    right = worlds(4).run(run_steps, "adagrad", "odd_dims", "weighted", **options)
    actual = worlds(4).run(
        run_steps,
        "adagrad",
        "odd_dims",
        "weighted",
        exchange="towers",
        ranks_per_host=1,
        compress=True,
        **options,
    )
    for (own, _), (other, _) in zip(actual, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    records = [whole_records(results, "adagrad", "odd_dims") for results in (actual, right)]
    assert np.array_equal(*records)


@pytest.mark.parametrize(
    "options", [{"ranks_per_host": 1}, {"ranks_per_host": 2}], ids=["3 x 1", "2 + 1"]
)
def test_a_bad_batch_is_named_on_every_rank_and_changes_nothing(worlds, options):
    for bad_rank in range(3):
        results = worlds(3).run(cases.meet_a_bad_batch, bad_rank, exchange="towers", **options)
        assert any(goes_on for *_, goes_on in results)
        for rank, ((kind, text), unchanged, _) in enumerate(results):
            assert kind == ("RowIdError" if rank == bad_rank else "DataError")
            assert "id 9 for feature 'y' in sample 4" in text and unchanged


def test_programs_that_look_up_out_of_turn_and_ranks_that_run_out(worlds):
    options = {"exchange": "towers", "ranks_per_host": 2}
    for plain, fed in worlds(3).run(cases.lookup_twice_then_update_twice, **options):
        assert all(np.array_equal(a, b) for a, b in zip(plain, fed, strict=True))
    for num_batches in ([3, 1, 0], [0, 0, 0]):
        result = worlds(3).run(cases.run_out_of_batches, num_batches, **options)
        for rank, (sizes, _, steps) in enumerate(result):
            assert sizes == [3 + i if i < num_batches[rank] else 0 for i in range(max(num_batches))]
            assert steps == max(num_batches)


def test_learned_weights_get_the_gradient_of_alltoall(worlds):
    right = worlds(2).run(cases.learn_weights)
    for (actual, _), (other, _) in zip(
        worlds(2).run(cases.learn_weights, exchange="towers", ranks_per_host=1), right, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))
