import numpy as np
import pytest

from pibroch.embedding import SGD, Adam, MemoryShard, RowWiseAdagrad, Table
from pibroch.embedding.checkpoint import (
    SavedTable,
    check_tables_match,
    load_tables,
    save_tables,
    saved_shape,
    table_file,
)
from pibroch.embedding.storage import verify_file
from pibroch.errors import CheckpointError

TABLES = [Table("a", 7, 3), Table("b/../c ü", 5, 3)]


def test_tables_return_with_their_state_and_into_another_row_space(tmp_path):
    first = MemoryShard.whole(TABLES, Adam(lr=0.1), seed=1)
    first.records[:] = np.random.default_rng(0).standard_normal(first.records.shape)
    digests = save_tables(tmp_path, TABLES, first)
    for file, digest in digests.items():
        verify_file(tmp_path / file, digest)
        assert (tmp_path / file).resolve().parent == tmp_path / "tables"
    second = MemoryShard.whole(TABLES[::-1], Adam(lr=0.1), seed=2)
    load_tables(tmp_path, TABLES, second)
    for table in TABLES:
        np.testing.assert_array_equal(second.weights(table.name), first.weights(table.name))
        for field, state in first.state(table.name).items():
            np.testing.assert_array_equal(second.state(table.name)[field], state)


def test_weights_alone_load_into_another_optimizer(tmp_path):
    first = MemoryShard.whole(TABLES, Adam(lr=0.1), seed=1)
    save_tables(tmp_path, TABLES, first)
    second = MemoryShard.whole(TABLES, SGD(lr=0.1), seed=2)
    load_tables(tmp_path, TABLES, second)
    np.testing.assert_array_equal(second.weights("a"), first.weights("a"))


def test_equal_tables_are_equal_files(tmp_path):
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        save_tables(tmp_path / run, TABLES, MemoryShard.whole(TABLES, Adam(lr=0.1), seed=1))
    for table in TABLES:
        file = table_file(table.name)
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


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


def test_the_shape_that_is_saved():
    shard = MemoryShard.whole(TABLES, RowWiseAdagrad(lr=0.1), seed=1)
    assert saved_shape("a", shard) == SavedTable(7, 3, {"sum": 1})
