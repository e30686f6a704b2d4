"""Sequences that preparation builds from a log of events."""

import numpy as np
import polars as pl
import pytest

from pibroch.data import EncodedDataset, Loader
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import ConfigError, DataError

SCHEMA = """label = "clicked"
[dense.price]
[categorical.item]
min_count = 1
[categorical.history]
multi_hot = true
max_length = 3
shares = "item"
events = { item = "item", user = "user", time = "at", clicks = true }
[categorical.user]
encoding = "hash"
num_buckets = 50
"""
NO_VOCABULARY = SCHEMA.replace("min_count = 1", 'encoding = "hash"\nnum_buckets = 99')


def random_log(count: int = 400) -> pl.DataFrame:
    rng = np.random.default_rng(3)
    items = [None if rng.random() < 0.05 else f"i{rng.integers(30)}" for _ in range(count)]
    users = [None if rng.random() < 0.05 else f"u{rng.integers(20)}" for _ in range(count)]
    return pl.DataFrame(
        {
            "clicked": rng.integers(0, 2, count),
            "price": rng.random(count),
            "item": items,
            "user": users,
            "at": np.cumsum(rng.integers(0, 3, count)) * 10,
        }
    )


def prepared(folder, log, schema=SCHEMA, kind="text", **options) -> EncodedDataset:
    schema = Schema.from_toml(schema) if isinstance(schema, str) else schema
    folder.mkdir()
    if kind == "text":
        log.write_csv(folder / "log.csv")
        source: TextSource | ParquetSource = TextSource(folder / "log.csv", ",", True)
    else:
        log.write_parquet(folder / "log.parquet")
        source = ParquetSource(folder / "log.parquet", schema)
    prepare([source], schema, folder / "out", PrepareOptions(piece_bytes=3000, **options))
    return EncodedDataset.open(folder / "out")


def expected(log: pl.DataFrame, most: int = 3) -> list[list[str]]:
    """Of each record, by its definition."""
    rows = log.rows(named=True)
    return [
        [
            earlier["item"]
            for earlier in rows
            if row["user"] is not None and earlier["user"] == row["user"]
            if earlier["at"] < row["at"] and earlier["clicked"] and earlier["item"] is not None
        ][-most:]
        for row in rows
    ]


def batches_of(dataset):
    return [next(iter(Loader(dataset.split(split), 1000))) for split in dataset.samples]


def same(one, other):
    pairs = zip(batches_of(one), batches_of(other), strict=True)
    return all(
        a.values.tolist() == b.values.tolist() and a.offsets.tolist() == b.offsets.tolist()
        for a, b in pairs
    )


@pytest.mark.parametrize("kind", ["text", "parquet"])
@pytest.mark.parametrize("schema", [SCHEMA, NO_VOCABULARY], ids=["vocabulary", "hash"])
def test_histories_are_those_of_the_definition(tmp_path, kind, schema):
    log = random_log()
    dataset = prepared(tmp_path / "a", log, schema, kind)
    vocabularies = Vocabularies.of_dataset(dataset)
    columns = {name: log[name].to_list() for name in ("clicked", "price", "item", "user")}
    columns["history"] = expected(log)
    raw = batch_from_raw(dataset.schema, vocabularies.encoders(), columns)
    first = 0
    for batch in batches_of(dataset):
        samples = range(first, first + batch.batch_size)
        for key in dataset.schema.keys:
            one, all_of = batch.select((key,)), raw.select((key,))
            offsets = all_of.offsets[samples.start : samples.stop + 1]
            assert one.values.tolist() == all_of.values[offsets[0] : offsets[-1]].tolist()
            assert one.offsets.tolist() == (offsets - offsets[0]).tolist()
        first = samples.stop
    assert first == len(log)


def test_memory_and_pieces_change_nothing(tmp_path):
    log = random_log()
    whole = prepared(tmp_path / "whole", log)
    few_users = prepared(tmp_path / "parts", log, history_bytes=5 * (16 * 3 + 64))
    assert same(whole, few_users)
    assert whole.fingerprint == few_users.fingerprint
    again = prepared(
        tmp_path / "again", log, whole.schema, vocabularies=Vocabularies.of_dataset(whole)
    )
    assert same(whole, again)


@pytest.mark.parametrize("stage", ["histories", "count", "encode"])
def test_an_interrupted_run_goes_on(tmp_path, stage):
    log = random_log()
    whole = prepared(tmp_path / "whole", log)
    source = TextSource(tmp_path / "whole" / "log.csv", ",", True)
    options = PrepareOptions(piece_bytes=3000)

    def interrupt(name: str, fraction: float) -> None:
        if name == stage:
            raise KeyboardInterrupt

    out = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        prepare([source], whole.schema, out, options, interrupt)
    stages: list[str] = []
    prepare([source], whole.schema, out, options, lambda name, _: stages.append(name))
    assert "parse" not in stages
    assert ("histories" in stages) == (stage == "histories")
    assert same(EncodedDataset.open(out), whole)


def test_without_a_time_records_are_in_order(tmp_path):
    log = random_log().with_columns(at=pl.int_range(400))
    schema = SCHEMA.replace('time = "at", ', "")
    assert same(prepared(tmp_path / "a", log, schema), prepared(tmp_path / "b", log))


def test_what_cannot_be_built_is_named(tmp_path):
    log = random_log()
    with pytest.raises(DataError, match="of an earlier `at` than the one before it of the same"):
        prepared(tmp_path / "a", log.reverse())
    with pytest.raises(DataError, match=r"`` as at, a finite number is needed"):
        prepared(tmp_path / "b", log.with_columns(at=pl.lit(None)))
    with pytest.raises(DataError, match="need a column `user`"):
        prepared(tmp_path / "c", log.drop("user"))
    vocabularies = Vocabularies.of_dataset(prepared(tmp_path / "d", log))
    with pytest.raises(DataError, match="`history`, a sequence of clicks"):
        prepared(
            tmp_path / "e", log, vocabularies.schema, vocabularies=vocabularies, has_labels=False
        )
    with pytest.raises(ConfigError, match="`max_length` for the sequence `history`"):
        Schema.from_toml(SCHEMA.replace("max_length = 3\n", ""))
    with pytest.raises(ConfigError, match="which `history` would give away"):
        Schema.from_toml(SCHEMA.replace('item = "item"', 'item = "clicked"'))
    schema = Schema.from_toml(SCHEMA)
    assert Schema.from_toml(schema.to_toml()) == schema
