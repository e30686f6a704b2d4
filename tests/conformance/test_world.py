"""Every exchange and placement at every number of ranks.

Within rounding of one process, equal bits at one number of ranks.
"""

from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from exchanges import CASES, OF_SEVERAL_RANKS, options_of, placements_of, takes
from reference import Reference

import cases
import pibroch as pb
from cases import (
    OPTIMIZERS,
    SHAPES,
    SIZES,
    batch_of_kind,
    loss_of,
    optimizers,
    records_of,
    run_steps,
)
from grids import some

ROW_WISE_OPTIMIZERS = ("row_wise_adagrad", "row_wise_adam")
KIND_OF = dict(
    zip(OPTIMIZERS, ("jagged", "weighted", "one_hot", "weighted", "jagged"), strict=True)
)


def whole_records(results, tables, optimizer):
    """The numbers of all rows from the pieces of all ranks; replicas must have the same bits."""
    return records_of([piece for _, pieces in results for piece in pieces], tables, optimizer)


EXACT = [(exchange, placement) for exchange, placement in CASES if placement != "row_wise_pooled"]
"""Those with equal bits, but for what the tests say."""


@lru_cache
def expected(name, shape):
    """Pooled embeddings of each step and records at the end, by one process in float64."""
    tables = SHAPES[shape]
    reference = Reference(pb.Embeddings(tables, optimizers(name, shape), seed=3))
    batches = [batch_of_kind(tables, size, step, KIND_OF[name]) for step, size in enumerate(SIZES)]
    return [reference.step(batch, loss_of) for batch in batches], reference.records


@lru_cache
def bits(world, name, shape):
    """What the first placement gives at this number of ranks."""
    results = world.run(run_steps, name, shape, KIND_OF[name], placement="row_wise")
    return results, whole_records(results, SHAPES[shape], optimizers(name, shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("exchange", "placement"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_steps_equal_the_reference_and_each_other(worlds, size, exchange, placement, shape):
    options = options_of(exchange, placement, SHAPES[shape])
    number = size + CASES.index((exchange, placement)) + [*SHAPES].index(shape)
    for name in some(OPTIMIZERS, number, 5):
        first, first_records = bits(worlds(size), name, shape)
        results = first
        records = first_records
        if options != {"exchange": "alltoall", "placement": "row_wise"}:
            results = worlds(size).run(run_steps, name, shape, KIND_OF[name], **options)
            records = whole_records(results, SHAPES[shape], optimizers(name, shape))
        if shape != "narrow":  # whose rounding the next steps amplify: step by step below
            pooled_of_step, reference_records = expected(name, shape)
            for step, right in enumerate(pooled_of_step):
                pooled = torch.cat([pooled_of_step[step] for pooled_of_step, _ in results])
                torch.testing.assert_close(pooled.double(), right, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(records, reference_records, rtol=5e-4, atol=5e-5)
        chosen = options.get("placement", "")
        kinds = {chosen} if isinstance(chosen, str) else set(chosen.values())
        is_rounded = "row_wise_pooled" in kinds or (
            "column_wise" in kinds and name in ROW_WISE_OPTIMIZERS
        )
        if not (is_rounded and size > 1):
            assert np.array_equal(records, first_records), (
                f"{name}: other bits than row-wise placement"
            )
            for (actual, _), (other, _) in zip(results, first, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


@pytest.mark.parametrize("placement", ["row_wise", "column_wise"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_steps_of_narrow_rows_equal_the_reference_but_for_their_rounding(worlds, size, placement):
    """Column-wise as well, whose row-wise optimizers are held to nothing else."""
    tables = SHAPES["narrow"]
    for name in OPTIMIZERS:
        results = worlds(size).run(
            cases.watch_steps,
            name,
            "narrow",
            KIND_OF[name],
            exchange="alltoall",
            placement=placement,
        )
        reference = Reference(pb.Embeddings(tables, optimizers(name, "narrow"), seed=3))
        for step, of_ranks in enumerate(zip(*results, strict=True)):
            right = reference.step(batch_of_kind(tables, SIZES[step], step, KIND_OF[name]), loss_of)
            pooled = torch.cat([pooled for pooled, _ in of_ranks])
            torch.testing.assert_close(pooled.double(), right, rtol=1e-4, atol=1e-5)
            records = records_of(
                [piece for _, pieces in of_ranks for piece in pieces],
                tables,
                optimizers(name, "narrow"),
            )
            reference.adopt(records)
            np.testing.assert_allclose(records, reference.records, rtol=5e-4, atol=5e-5)


@pytest.fixture(params=OF_SEVERAL_RANKS)
def exchange(request):
    return request.param


@pytest.mark.full
def test_an_id_outside_its_table_is_named_on_every_rank_and_changes_nothing(worlds, exchange):
    for bad_rank in range(3):
        results = worlds(3).run(cases.meet_a_bad_batch, bad_rank, exchange=exchange)
        assert any(goes_on for *_, goes_on in results)
        for rank, (message, unchanged, _) in enumerate(results):
            kind, text = message
            assert kind == ("RowIdError" if rank == bad_rank else "DataError")
            assert "id 9 for feature 'y' in sample 4" in text
            assert rank == bad_rank or f"rank {bad_rank}" in text
            assert unchanged


def test_reading_ahead_changes_nothing_for_programs_that_look_up_out_of_turn(worlds, exchange):
    for plain, fed in worlds(2).run(cases.lookup_twice_then_update_twice, exchange=exchange):
        assert all(np.array_equal(a, b) for a, b in zip(plain, fed, strict=True))


@pytest.mark.full
def test_a_rank_that_runs_out_of_batches_gets_empty_ones(worlds, exchange):
    for num_batches in ([3, 1, 0], [0, 0, 2], [2, 2, 2], [0, 0, 0]):
        result = worlds(3).run(cases.run_out_of_batches, num_batches, exchange=exchange)
        for rank, (sizes, _, steps) in enumerate(result):
            assert sizes == [3 + i if i < num_batches[rank] else 0 for i in range(max(num_batches))]
            assert steps == max(num_batches)


@pytest.mark.parametrize(("wire", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("name", [name for name in OF_SEVERAL_RANKS if takes(name, "wire")])
def test_a_narrow_wire_is_near_and_the_same_for_every_placement(worlds, name, wire, tolerance):
    exact, _ = bits(worlds(2), "adagrad", "odd_dims")
    run = partial(worlds(2).run, run_steps, "adagrad", "odd_dims", "weighted", wire=wire)
    first = run(placement="row_wise")
    kinds = [
        kind
        for kind in placements_of(name).values()
        if isinstance(kind, str) and "pooled" not in kind
    ]
    for placement in kinds:
        for rank, (pooled_of_step, _) in enumerate(run(exchange=name, placement=placement)):
            for step, pooled in enumerate(pooled_of_step):
                assert torch.equal(pooled, first[rank][0][step]), placement
                torch.testing.assert_close(
                    pooled, exact[rank][0][step], rtol=tolerance, atol=tolerance
                )
    assert not torch.equal(first[0][0][0], exact[0][0][0])


def test_a_state_dict_never_has_a_part_under_a_whole_tables_name(worlds):
    whole = {
        f"embedding_bags.{table.name}.weight": [table.num_rows, table.dim]
        for table in SHAPES["odd_dims"]
    }
    for exchange, placement in CASES:
        options = options_of(exchange, placement, SHAPES["odd_dims"])
        message = worlds(2).run(cases.name_what_a_state_dict_lacks, **options)
        if options.get("placement") == "replicated":
            assert message == [whole, whole]
        else:
            assert all(
                each == whole or "on several ranks" in each or "shards" in each for each in message
            ), message
            assert message != [whole, whole]


def test_whole_tables_load_wherever_their_parts_lie(worlds):
    for exchange, placement in EXACT:
        results = worlds(2).run(
            cases.load_a_state_dict, **options_of(exchange, placement, SHAPES["odd_dims"])
        )
        assert results == [([False] * 3 + [True] * 3, True)] * 2, (exchange, placement)


def test_of_two_modules_one_reads_ahead_and_ragged_ranks_take_every_step_of_both(worlds, exchange):
    results = worlds(2).run(cases.train_two_modules, [5, 3], exchange=exchange)
    for message, steps, _ in results:
        assert steps == (5, 5)
        assert (
            (message is None)
            if exchange == "ask_first"
            else "got a feed of another module's feed" in message
        )
    if exchange not in ("alltoall", "ask_first"):  # which holds other pieces
        for (*_, actual), (*_, right) in zip(
            results, worlds(2).run(cases.train_two_modules, [5, 3], "alltoall"), strict=True
        ):
            np.testing.assert_equal(actual, right)


@pytest.mark.full
def test_weights_from_outside_arrive_wherever_their_rows_lie(worlds):
    right = worlds(3).run(cases.load_from_outside)
    records = whole_records(right, SHAPES["any"], cases.optimizers("adam", "any"))
    for exchange, placement in EXACT:
        if placement != "row_wise":
            results = worlds(3).run(
                cases.load_from_outside, **options_of(exchange, placement, SHAPES["any"])
            )
            assert np.array_equal(
                whole_records(results, SHAPES["any"], cases.optimizers("adam", "any")), records
            )
            for (actual, _), (other, _) in zip(results, right, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


def test_weights_that_are_learned_get_the_same_gradient_wherever_rows_lie(worlds):
    right = worlds(2).run(cases.learn_weights)
    assert all(gradient.abs().sum() > 0 for actual, _ in right for gradient in actual[1::2])
    records = whole_records(right, SHAPES["any"], cases.optimizers("adagrad", "any"))
    for exchange, placement in CASES:
        options = options_of(exchange, placement, SHAPES["any"])
        if placement in (
            "row_wise",
            "table_wise_pooled",
            "row_wise_pooled",
            "halves",
        ):  # of which some pool where rows are
            continue
        results = worlds(2).run(cases.learn_weights, **options)
        assert np.array_equal(
            whole_records(results, SHAPES["any"], cases.optimizers("adagrad", "any")), records
        )
        for (own, _), (other, _) in zip(results, right, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
