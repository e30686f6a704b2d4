import pytest

import pibroch as pb
from pibroch.config.exchange import PLACEMENTS
from pibroch.errors import ConfigError
from pibroch.planner import Placement, Plan

TABLES = [pb.Table("a", 9, 6), pb.Table("b", 2, 6), pb.Table("c", 400, 6)]


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_every_number_has_one_primary_home(kind, num_shards):
    plan = Plan.of(TABLES, num_shards, kind)
    plan.check(TABLES)
    for table in TABLES:
        pieces = plan.pieces(table)
        homes = [
            (row, column)
            for _, p in pieces
            if p.is_primary
            for row in p.rows
            for column in p.columns
        ]
        assert sorted(homes) == [
            (row, column) for row in range(table.num_rows) for column in range(table.dim)
        ]
        assert all(0 <= shard < num_shards for shard, _ in pieces)
        if kind == "replicated":
            assert sorted(shard for shard, _ in pieces) == list(range(num_shards))
        elif kind != "column_wise":
            assert len({shard for shard, _ in pieces}) == len(pieces)


def test_hot_rows_at_the_beginning_spread_over_shards():
    plan = Plan.of(TABLES, 4, "row_wise")
    owner = {row: shard for shard, piece in plan.pieces(TABLES[2]) for row in piece.rows}
    assert [owner[row] for row in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_table_wise_spreads_what_batches_ask_for_and_not_memory():
    tables = [pb.Table("huge", 10_000_000, 4), *(pb.Table(f"t{i}", 5_000, 4) for i in range(5))]
    plan = Plan.of(tables, 2, "table_wise")
    shards = [plan.placements[table.name].shards[0] for table in tables]
    assert sorted([shards.count(0), shards.count(1)]) == [3, 3]


def test_kinds_by_name_and_files(tmp_path):
    plan = Plan.of(TABLES, 3, {"b": "replicated", "": "column_wise"})
    assert [plan.placements[table.name].kind for table in TABLES] == [
        "column_wise",
        "replicated",
        "column_wise",
    ]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan.of(TABLES, 2, "rowwise"), "one of table_wise, "),
        (lambda: Plan.of(TABLES, 2, {"d": "row_wise"}), "table 'd'"),
        (lambda: Plan.of(TABLES, 2).check(TABLES[:2]), "'c'"),
        (lambda: odd_plan(Placement(kind="table_wise", shards=(0, 1))), "'a'"),
        (lambda: odd_plan(Placement(kind="table_wise", shards=(7,))), "'a'"),
        (lambda: odd_plan(Placement(kind="row_wise", shards=(1, 1))), "'a'"),
        (lambda: odd_plan(Placement(kind="column_wise", shards=(0, 1, 0, 1))), "dim 6"),
        (lambda: odd_plan(Placement(kind="replicated", shards=(0,))), "'a'"),
    ],
)
def test_wrong_plans_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def odd_plan(placement):
    plan = Plan.of(TABLES, 2)
    Plan(num_shards=2, placements={**plan.placements, "a": placement}).check(TABLES)


def test_files_that_are_no_plans_are_named(tmp_path):
    (tmp_path / "odd.json").write_text('{"num_shards": 2}')
    for name in ("odd.json", "absent.json"):
        with pytest.raises(ConfigError, match=name):
            Plan.load(tmp_path / name)
