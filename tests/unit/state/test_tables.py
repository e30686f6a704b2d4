"""Tables cut into pieces in one way, saved, and loaded into pieces cut in another."""

from itertools import chain

import numpy as np
import pytest

from pibroch.config.exchange import PLACEMENTS
from pibroch.embedding import SGD, Adam, MemoryShard, RowWiseAdagrad, RowWiseAdam, Table
from pibroch.embedding.row_marks import SAVED
from pibroch.embedding.row_set import ids_of
from pibroch.errors import CheckpointError
from pibroch.planner import Plan
from pibroch.state.deltas import write_deltas
from pibroch.state.files import verify_file
from pibroch.state.tables import (
    Extent,
    SavedTable,
    check_tables_match,
    load_tables,
    mark_changes,
    part_names,
    save_tables,
    saved_tables,
)
from row_plans import random_plan

TABLES = [Table("a", 23, 4), Table("b/../c@ü", 5, 4), Table("one", 1, 4)]
OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "adam": Adam(lr=0.1),
    "rowwise": RowWiseAdam(lr=0.1),
    "averaged": RowWiseAdagrad(lr=0.1, average=0.9),
}


def shards_by_rank(plan, optimizer, tables=TABLES, dtype="float32"):
    """Of each rank of a plan, a shard of each width of columns."""
    ranks = []
    for rank in range(plan.num_shards):
        pieces = [piece for table in tables for shard, piece in plan.pieces(table) if shard == rank]
        widths = sorted({len(piece.columns) for piece in pieces})
        by_width = [[piece for piece in pieces if len(piece.columns) == width] for width in widths]
        shards = [
            MemoryShard(same, width, optimizer, 7, dtype=dtype)
            for same, width in zip(by_width, widths, strict=True)
        ]
        for shard in shards:
            shard.start_marks(SAVED)
        ranks.append(shards)
    return ranks


def views_of(shards):
    return [view for shard in shards for view in shard.views()]


def shards_of(plan, optimizer, tables=TABLES, dtype="float32"):
    """The views of each rank of a plan, of shards of each width of columns."""
    return [views_of(shards) for shards in shards_by_rank(plan, optimizer, tables, dtype)]


def fill(ranks, optimizer, tables=TABLES):
    """Give each cell a number that tells its table, row, column and field.

    Returns which rows of each table count as changed.
    """
    changed = {}
    for number, table in enumerate(tables):
        generator = np.random.default_rng(number)
        fields = {"weight": table.dim, **optimizer.state_fields(table.dim)}
        whole = {
            name: generator.random((table.num_rows, floats), np.float32)
            for name, floats in fields.items()
        }
        changed[table.name] = generator.random(table.num_rows) < 0.4
        for view in [view for views in ranks for view in views if view.piece.table == table]:
            rows = ids_of(view.piece.rows)
            columns = slice(view.piece.columns.start, view.piece.columns.stop)
            for name, target in {"weight": view.weights, **view.state}.items():
                target[:] = whole[name][rows][
                    :, columns if fields[name] == table.dim else slice(None)
                ]
            view.marks[SAVED][:] = changed[table.name][rows]
    return changed


def save(folder, ranks, optimizer, *, tables=TABLES):
    folder.mkdir(exist_ok=True)
    saved = saved_tables(tables, optimizer)
    names = part_names(
        [Extent.of(v.piece) for views in ranks for v in views if v.piece.is_primary], saved
    )
    written = [part for views in ranks for part in save_tables(folder, views, names)]
    return check_written(folder, written, saved)


def save_changed(folder, ranks, optimizer, name):
    """The rows that changed, of shards, as deltas."""
    written = []
    for rank, shards in enumerate(ranks):
        cuts = [shard.cut_in_place(SAVED) for shard in shards]
        written += write_deltas(folder, f"{name}-{rank}", list(chain(*cuts)))
        assert not any(view.marks[SAVED].any() for view in views_of(shards))
    return check_written(folder, written, saved_tables(TABLES, optimizer))


def check_written(folder, written, saved):
    for part in written:
        verify_file(folder, part.part.file, part.digest)
        assert (folder / part.part.file).resolve().parent == folder / "tables"
    assert len({part.part.file for part in written}) == len(written)
    return {
        name: SavedTable(
            table.num_rows,
            table.dim,
            table.state,
            tuple(w.part for w in written if w.table == name),
        )
        for name, table in saved.items()
    }


def assert_equal(views, expected):
    for view, other in zip(views, expected, strict=True):
        np.testing.assert_array_equal(view.weights, other.weights, str(view.piece))
        for field in view.state:
            np.testing.assert_array_equal(
                view.state[field], other.state[field], f"{field} of {view.piece}"
            )


MIXED = {"a": "column_wise", "one": "replicated", "": "row_wise"}
PLANS = [
    (1, "table_wise"),
    *((ranks, kind) for ranks in (2, 3, 4) for kind in PLACEMENTS),
    (4, MIXED),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_plan_loads_what_any_other_saved(tmp_path, optimizer):
    plans = [Plan.of(TABLES, ranks, placement) for ranks, placement in PLANS]
    plans += [
        random_plan(TABLES, ranks, seed, copies=seed > 1) for seed, ranks in enumerate((1, 3, 4))
    ]
    for number, plan in enumerate(plans):
        ranks = shards_of(plan, optimizer)
        fill(ranks, optimizer)
        saved = save(tmp_path / str(number), ranks, optimizer)
        for other in plans:
            loaded = shards_of(other, optimizer)
            expected = shards_of(other, optimizer)
            fill(expected, optimizer)
            for views, right in zip(loaded, expected, strict=True):
                load_tables(tmp_path / str(number), saved, views)
                assert_equal(views, right)
                assert all(view.marks[SAVED].all() for view in views)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_of_16_bits_load_as_they_were_saved(tmp_path, optimizer):
    tables = [Table("a", 23, 5), Table("one", 1, 5)]  # columns cut in two are 3 and 2
    for number, (saving, loading) in enumerate(
        [(1, "row_wise"), (2, "column_wise"), (3, "row_wise")]
    ):
        ranks = shards_of(Plan.of(tables, 2, "column_wise"), optimizer, tables, "bfloat16")
        fill(ranks, optimizer, tables)
        saved = save(tmp_path / str(number), ranks, optimizer, tables=tables)
        plan = Plan.of(tables, saving, loading)
        wide, narrow, again = (
            shards_of(plan, optimizer, tables, dtype)
            for dtype in ("float32", "bfloat16", "bfloat16")
        )
        for of_wide, of_narrow in zip(wide, narrow, strict=True):
            for views in (of_wide, of_narrow):
                load_tables(tmp_path / str(number), saved, views)
            assert_equal(of_narrow, of_wide)
            assert not any(
                (np.array(view.weights).view(np.uint32) & 0xFFFF).any() for view in of_wide
            )
        saved = save(tmp_path / f"{number} again", narrow, optimizer, tables=tables)
        for views, right in zip(again, narrow, strict=True):
            load_tables(tmp_path / f"{number} again", saved, views)
            assert_equal(views, right)


@pytest.mark.parametrize(
    "optimizer", [OPTIMIZERS["adam"], OPTIMIZERS["averaged"]], ids=["adam", "averaged"]
)
def test_changed_rows_over_a_full_checkpoint_are_the_whole(tmp_path, optimizer):
    """The full one is of one plan, the changed rows are written and read by others."""
    saved = save(tmp_path / "all", shards_of(Plan.of(TABLES, 3, "row_wise"), optimizer), optimizer)
    for number, placement in enumerate(PLANS):
        ranks = shards_by_rank(Plan.of(TABLES, *placement), optimizer)
        before = shards_of(Plan.of(TABLES, 2, MIXED), optimizer)
        fill(before, optimizer)
        changed = fill(list(map(views_of, ranks)), optimizer)
        delta = save_changed(tmp_path / "all", ranks, optimizer, f"plan-{number}")
        for name, table in delta.items():
            parts = (*saved[name].parts, *table.parts)
            delta[name] = SavedTable(table.num_rows, table.dim, table.state, parts)
        for views, right in zip(
            shards_of(Plan.of(TABLES, 2, MIXED), optimizer), before, strict=True
        ):
            fresh = [
                (view.weights.copy(), {field: s.copy() for field, s in view.state.items()})
                for view in views
            ]
            load_tables(tmp_path / "all", delta, views)
            mark_changes(tmp_path / "all", delta, views, SAVED)
            for view, other, (weights, state) in zip(views, right, fresh, strict=True):
                mask = changed[view.piece.table.name][np.array(view.piece.rows, dtype=np.int64)]
                np.testing.assert_array_equal(view.marks[SAVED], mask, f"{number}: {view.piece}")
                np.testing.assert_array_equal(
                    view.weights, np.where(mask[:, None], other.weights, weights)
                )
                for field, now in view.state.items():
                    np.testing.assert_array_equal(
                        now, np.where(mask[:, None], other.state[field], state[field])
                    )


def test_weights_alone_load_into_another_optimizer(tmp_path):
    plan = Plan.of(TABLES, 1)
    optimizer = Adam(lr=0.1)
    ranks = shards_of(plan, optimizer)
    fill(ranks, optimizer)
    saved = save(tmp_path, ranks, optimizer)
    (views,) = shards_of(plan, SGD(lr=0.1))
    load_tables(tmp_path, saved, views)
    assert_equal(views, ranks[0])


def test_one_rank_writes_a_file_a_table_and_equal_tables_are_equal_files(tmp_path):
    for run in ("one", "two"):
        save(tmp_path / run, shards_of(Plan.of(TABLES, 1), Adam(lr=0.1)), Adam(lr=0.1))
    files = sorted(path.name for path in (tmp_path / "one" / "tables").iterdir())
    assert files == ["a.safetensors", "b%2F..%2Fc%40%C3%BC.safetensors", "one.safetensors"]
    for file in files:
        assert (tmp_path / "one" / "tables" / file).read_bytes() == (
            tmp_path / "two" / "tables" / file
        ).read_bytes()


def test_a_tensor_of_another_width_is_refused(tmp_path):
    saved = save(tmp_path, shards_of(Plan.of(TABLES, 1), Adam(lr=0.1)), Adam(lr=0.1))
    (views,) = shards_of(Plan.of(TABLES, 1), RowWiseAdam(lr=0.1))
    with pytest.raises(CheckpointError, match=r"'exp_avg_sq' float32 \[23, 4\].*need 1 floats"):
        load_tables(
            tmp_path, {**saved, "a": SavedTable(23, 4, {"exp_avg": 4}, saved["a"].parts)}, views
        )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": SavedTable(8, 3, {"sum": 1})}, "'a' with 7 rows x 3.*need 8 rows x 3"),
        ({"a": SavedTable(7, 4, {"sum": 1})}, "need 7 rows x 4"),
        ({"b": SavedTable(7, 3, {"sum": 1})}, "no table 'b'"),
        ({}, "table 'a' in the checkpoint"),
        ({"a": SavedTable(7, 3, {"exp_avg": 3})}, r"state sum\[1\].*need.*exp_avg\[3\].*optimizer"),
    ],
)
def test_a_difference_names_the_table_and_both_sizes(wanted, message):
    with pytest.raises(CheckpointError, match=message):
        check_tables_match({"a": SavedTable(7, 3, {"sum": 1})}, wanted)


def test_a_part_of_the_state_may_be_wanted():
    saved = {"a": SavedTable(7, 3, {"sum": 1, "average": 3})}
    check_tables_match(saved, {"a": SavedTable(7, 3, {"average": 3})}, same_state=False)
    with pytest.raises(CheckpointError, match="average"):
        check_tables_match(saved, {"a": SavedTable(7, 3, {"average": 4})}, same_state=False)
