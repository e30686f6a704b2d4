"""Sequences: the last items of lists and of delimited text, in a table that two columns read."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pibroch.data import EncodedDataset, Loader
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import ConfigError

SCHEMA = """label = "y"
[categorical.user]
encoding = "hash"
num_buckets = 100
[categorical.item]
min_count = 2
[categorical.seen]
multi_hot = true
max_length = 3
shares = "item"
[categorical.tags]
multi_hot = true
delimiter = ";"
min_count = 1
"""
ROWS = [
    # y, user, item, seen, tags
    (1, "u", "a", [], ["x"]),
    (0, "u", "b", ["a"], []),
    (1, "v", "a", ["c", "b", "a", "b", "c"], ["x", "y"]),
    (0, "w", "d", ["q", "b", "", "a"], ["y"]),
]


def text_file(path: Path) -> Path:
    lines = [f"{y},{u},{i},{'|'.join(seen)},{';'.join(tags)}" for y, u, i, seen, tags in ROWS]
    path.write_text("\n".join(["y,user,item,seen,tags", *lines, ""]))
    return path


def parquet_file(path: Path) -> Path:
    columns = dict(zip(["y", "user", "item", "seen", "tags"], zip(*ROWS, strict=True), strict=True))
    pl.DataFrame({name: list(values) for name, values in columns.items()}).write_parquet(path)
    return path


def prepared(tmp_path: Path, schema: Schema, kind: str, **options) -> EncodedDataset:
    if kind == "text":
        source: TextSource | ParquetSource = TextSource(text_file(tmp_path / "log.csv"), ",", True)
    else:
        source = ParquetSource(parquet_file(tmp_path / "log.parquet"), schema)
    out = tmp_path / f"of {kind}"
    prepare([source], schema, out, PrepareOptions(split=SplitRule.parse("none", 0), **options))
    return EncodedDataset.open(out)


def ids_of(dataset: EncodedDataset) -> dict[str, list[list[int]]]:
    (batch,) = Loader(dataset.split("train"), len(ROWS))
    bags = np.split(batch.values.numpy(), batch.offsets[1:-1].numpy())
    size = batch.batch_size
    return {
        key: [bag.tolist() for bag in bags[place * size : (place + 1) * size]]
        for place, key in enumerate(batch.keys)
    }


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_the_last_items_read_the_table_that_is_shared(tmp_path, kind):
    dataset = prepared(tmp_path, Schema.from_toml(SCHEMA), kind)
    assert dataset.schema.readers == {
        "user": ("user",),
        "item": ("item", "seen"),
        "tags": ("tags",),
    }
    assert list(dataset.num_rows) == ["user", "item", "tags"]
    # as they are kept a is there 5 times, b 3 times, c and d once, so that these are unknown
    a, b = 2, 3
    ids = ids_of(dataset)
    assert ids["item"] == [[a], [b], [a], [0]]
    assert ids["seen"] == [[], [a], [a, b, 0], [b, 1, a]]
    assert dataset.num_rows["item"] == 4
    assert dataset.access_counts("item").tolist() == [2, 1, 5, 3]
    assert not (dataset.path / "tables" / "seen.counts.i64").exists()
    assert ids["tags"] == [[2], [], [2, 3], [3]] or ids["tags"] == [[3], [], [3, 2], [2]]


def test_text_and_lists_are_the_same_data(tmp_path):
    text, lists = (
        prepared(tmp_path, Schema.from_toml(SCHEMA), kind) for kind in ("text", "parquet")
    )
    assert ids_of(text) == ids_of(lists)
    assert text.fingerprint == lists.fingerprint


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_raw_values_have_the_rows_of_preparation(tmp_path, kind):
    dataset = prepared(tmp_path, Schema.from_toml(SCHEMA), kind)
    vocabularies = Vocabularies.of_dataset(dataset)
    names = ("user", "item", "seen", "tags")
    values = list(zip(*ROWS, strict=True))[1:]
    columns = dict(zip(names, (list(each) for each in values), strict=True))
    batch = batch_from_raw(dataset.schema, vocabularies.encoders(), columns)
    (loaded,) = Loader(dataset.split("train"), len(ROWS))
    assert batch.values.tolist() == loaded.values.tolist()
    assert batch.offsets.tolist() == loaded.offsets.tolist()
    again = prepare_again(tmp_path, vocabularies, kind)
    assert ids_of(again) == ids_of(dataset)


def prepare_again(tmp_path: Path, vocabularies: Vocabularies, kind: str) -> EncodedDataset:
    (tmp_path / "again").mkdir()
    return prepared(tmp_path / "again", vocabularies.schema, kind, vocabularies=vocabularies)


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_nulls_are_missing_values_everywhere(tmp_path, kind):
    schema = Schema.from_toml(
        'label = "y"\nnulls = ["NULL", "-1"]\n[dense.number]\n[categorical.user]\nmin_count = 1\n'
        '[categorical.bin]\ncolumn = "number"\nbinning = "log"\n[categorical.seen]\n'
        'multi_hot = true\nmin_count = 1\n[categorical.code]\nencoding = "integer"\n'
        "num_buckets = 9\n"
    )
    lists = [["a", "NULL"], ["-1"], ["b"], []]
    columns = {
        "y": [1, 0, 1, 0],
        "number": ["-1", "7", "NULL", ""],
        "user": ["NULL", "u", "NULLS", "-1"],
        "seen": lists if kind == "parquet" else ["a|NULL", "-1", "b", "NULL"],
        "code": ["3", "-1", "12", "NULL"],
    }
    frame = pl.DataFrame(columns)
    if kind == "text":
        frame.write_csv(tmp_path / "log")
        source = TextSource(tmp_path / "log", ",", True)
    else:
        frame.write_parquet(tmp_path / "log")
        source = ParquetSource(tmp_path / "log", schema)
    prepare([source], schema, tmp_path / "out", PrepareOptions(split=SplitRule.parse("none", 0)))
    dataset = EncodedDataset.open(tmp_path / "out")
    ids = ids_of(dataset)
    user, name = ids["user"][1][0], ids["user"][2][0]
    assert ids["user"] == [[1], [user], [name], [1]] and {user, name} == {2, 3}
    assert [each[0] for each in ids["bin"]][::2] == [1, 1] and ids["bin"][1][0] > 1
    a, b = ids["seen"][0][0], ids["seen"][2][0]
    assert ids["seen"] == [[a, 1], [1] if kind == "parquet" else [], [b], []]
    assert ids["code"] == [[5], [1], [0], [1]]
    assert dataset.split("train").dense[:, 0].tolist() == pytest.approx([0, np.log(8), 0, 0])
    del columns["y"]
    encoders = Vocabularies.of_dataset(dataset).encoders()
    (loaded,) = Loader(dataset.split("train"), len(ROWS))
    typed = columns | {"number": [-1, 7, None, ""], "code": [3, -1, 12, "NULL"]}
    for each in (columns, typed):
        batch = batch_from_raw(dataset.schema, encoders, each)
        assert batch.values.tolist() == loaded.values.tolist()
        assert batch.offsets.tolist() == loaded.offsets.tolist()
        assert np.array_equal(batch.dense, loaded.dense)


def test_a_schema_with_shared_tables_reads_back():
    schema = Schema.from_toml(SCHEMA)
    assert Schema.from_toml(schema.to_toml()) == schema
    assert schema.categorical[2].min_count == 2
    assert schema.keys_by_table == ("user", "item", "seen", "tags")
    hashed = schema.with_changes(hash_buckets={"item": 7})
    assert [each.num_buckets for each in hashed.categorical] == [100, 7, 7, None]
    with pytest.raises(ConfigError, match="no categorical feature `seen` to hash"):
        schema.with_changes(hash_buckets={"seen": 7})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (('shares = "item"', 'shares = "tem"'), "not `tem`"),
        (('shares = "item"', 'shares = "seen"'), "not `seen`"),
        (
            ("max_length = 3", "max_length = 3\nmin_count = 4"),
            "no `min_count` of its own for `seen`",
        ),
        (("[categorical.item]\nmin_count = 2", '[categorical.item]\nbinning = "log"'), "not both"),
        (
            ("multi_hot = true\nmax_length", "max_length"),
            "`multi_hot = true` with the `max_length`",
        ),
        (("max_length = 3", "max_length = 0"), "max_length"),
    ],
)
def test_what_cannot_be_shared_is_named(changed, message):
    with pytest.raises(ConfigError, match=message):
        Schema.from_toml(SCHEMA.replace(*changed))
