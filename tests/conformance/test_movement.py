"""Rows that move to another plan's homes while training goes on.

The bits of a run in which nothing moves.
"""

import movement_cases
import numpy as np
import pytest
import torch
from test_world import whole_records

import cases
import pibroch as pb
from cases import OPTIMIZERS, SHAPES
from row_plans import random_plan

EXCHANGES = {"alltoall": {}, "retrieve": {}, "retrieve, two hosts": {"hosts": [0, 1, 0, 1]}}


def check_same(results, expected, shape, name):
    optimizer = cases.optimizers(name, shape)
    tables = SHAPES[shape]
    records = [
        whole_records([(None, pieces) for _, pieces, *_ in each], tables, optimizer)
        for each in (results, expected)
    ]
    assert np.array_equal(*records)
    for (actual, *_), (other, *_) in zip(results, expected, strict=True):
        assert all(map(torch.equal, actual, other))


@pytest.mark.parametrize(
    ("kind", "size"),
    [("alltoall", 1), ("alltoall", 3), ("retrieve", 2), ("retrieve, two hosts", 4)],
)
def test_no_update_is_lost(worlds, kind, size):
    options = {"exchange": kind.partition(",")[0], **EXCHANGES[kind]}
    if "hosts" in options:
        options["hosts"] = options["hosts"][:size]
    for number, (name, shape) in enumerate(
        zip(OPTIMIZERS, ("any", "odd_dims", "shared", "any", "narrow"), strict=True)
    ):
        if (number + size) % 2:
            continue
        before, *plans = (
            random_plan(SHAPES[shape], size, seed + number, copies=size > 1) for seed in (0, 7, 11)
        )
        rows = (120, 3000)[number // 2 % 2]
        expected = worlds(size).run(
            movement_cases.train_and_move, name, shape, exchange="alltoall", placement=before
        )
        results = worlds(size).run(
            movement_cases.train_and_move,
            name,
            shape,
            plans,
            (1, 9),
            rows,
            placement=before,
            **options,
        )
        check_same(results, expected, shape, name)
        for *_, moving, _ in results:
            assert moving[2] and not moving[9] and not moving[-1], moving


def test_neither_by_loading_in_the_middle_nor_by_going_on_from_there(worlds):
    before, after = (random_plan(SHAPES["odd_dims"], 3, seed, copies=True) for seed in (1, 2))

    def run(**more):
        return worlds(3).run(
            movement_cases.train_and_move, "adam", "odd_dims", placement=before, **more
        )

    for more in ({"load_at": 6}, {"state_at": 6}):
        expected = run(exchange="alltoall", **more)
        for exchange in ("alltoall", "retrieve"):
            results = run(exchange=exchange, plans=[after], at=[3], rows_per_step=25, **more)
            check_same(results, expected, "odd_dims", "adam")
            assert all(moving[6] for _, _, moving, _ in results)


@pytest.mark.parametrize("exchange", ["alltoall", "retrieve"])
def test_rows_are_sent_about_once_and_a_few_a_step(worlds, exchange):
    plan = random_plan([pb.Table("a", 20_000, 16)], 2, 4, copies=False)
    results = worlds(2).run(movement_cases.count_rows, plan, exchange)
    assert not any(is_moving for *_, is_moving, _ in results)
    assert 20_000 <= sum(rows for rows, *_ in results) <= 20_000 * 1.1
    assert (
        sum(nbytes for _, _, nbytes, *_ in results)
        <= 1.1 * sum(leaving for _, leaving, *_ in results) * 4 * 32
    )
    record = 4 * 32 + 8
    for *_, sent in results:
        assert max(sent[6:]) <= max(sent[:5]) + 550 * record


@pytest.mark.parametrize(
    ("name", "shape", "at", "rows", "midway", "options"),
    [
        ("adam", "odd_dims", (3, 20), 3000, False, {"lookahead": 4}),
        ("adagrad", "any", (2, 16), 150, False, {"lookahead": 3, "cache_rows": 200}),
        (
            "sgd",
            "shared",
            (5, 12),
            3000,
            True,
            {"lookahead": 2, "cache": "partitioned", "delayed_sync": False},
        ),
    ],
)
def test_lookahead_drains_its_window_and_plans_on_over_the_new_homes(
    worlds, name, shape, at, rows, midway, options
):
    before, *plans = (random_plan(SHAPES[shape], 2, seed, copies=False) for seed in (0, 7, 11))
    expected = worlds(2).run(movement_cases.stay, name, shape, placement=before)
    results = worlds(2).run(
        movement_cases.look_ahead_and_move,
        name,
        shape,
        plans,
        at,
        rows,
        midway,
        placement=before,
        **options,
    )
    check_same(results, expected, shape, name)
    for _, _, planned, moving in results:
        ended = [step for step in range(1, len(moving)) if moving[step - 1] and not moving[step]]
        assert len(ended) == 2, moving
        first, last = at
        assert planned[first - 1] == first  # all steps before the move, none during it
        assert planned[ended[0] - 1] <= first + 1
        assert planned[last - 1] - planned[ended[0]] == last - 1 - ended[0]
        assert planned[-1] - planned[ended[1]] == len(planned) - 1 - ended[1]


def test_what_cannot_move_is_refused_with_the_reason(worlds):
    plan, three = (random_plan(SHAPES["odd_dims"], size, 1, copies=False) for size in (2, 3))
    refuse = lambda *args, **options: worlds(2).run(movement_cases.refuse_to_move, *args, **options)  # noqa: E731
    assert all("alltoall, retrieve or lookahead" in text for text in refuse("local", plan))
    copies = random_plan(SHAPES["odd_dims"], 2, 1, copies=True)
    assert all("copies or pools rows" in text for text in refuse("lookahead", copies))
    assert all("3 shards" in text for text in refuse("alltoall", three))
    assert all(
        "owners pool" in text for text in refuse("alltoall", plan, placement="table_wise_pooled")
    )
