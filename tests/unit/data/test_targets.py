"""Several labels, weights and groups, from text to batches."""

import json

import numpy as np
import polars as pl
import pytest
import torch

from pibroch.data import EncodedDataset, Loader
from pibroch.data.parquet import ParquetSource
from pibroch.data.parse import PieceParser
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import ConfigError, DataError
from several_labels import SCHEMA, prepared, records

COLUMNS = ("click", "seconds", "importance", "user", "item", "age")
YES = "no = 0, yes = 1"
ONE = """
label = "click"
[target.click]
values = { "-1" = 0, "1" = 1, "true" = 1, "false" = 0 }
[categorical.item]
encoding = "hash"
num_buckets = 9
"""


def parsed(text: str, schema: str = SCHEMA, columns=COLUMNS):
    return PieceParser(Schema.from_toml(schema), columns).parse(text.encode())


def test_labels_weights_and_groups_are_what_the_text_says(tmp_path):
    dataset = EncodedDataset.open(prepared(tmp_path))
    dataset.verify()
    rows = records()[:630]
    train = dataset.split("train")
    expected = [[float(row[0] == "yes"), float(row[1])] for row in rows]
    np.testing.assert_allclose(train.labels, np.array(expected, np.float32))
    np.testing.assert_allclose(train.sample_weights, [float(row[2]) for row in rows])
    by_user = {}
    for row, group in zip(rows, train.groups, strict=True):
        assert by_user.setdefault(row[3], group) == group
    assert len(set(by_user.values())) == len(by_user) == 40
    assert Schema.from_toml(dataset.schema.to_toml()) == dataset.schema


@pytest.mark.parametrize("split", ["time:0.5/0.3/0.2", "hash:0.5/0.3/0.2"])
def test_data_without_a_vocabulary_hold_the_same(tmp_path, split):
    """They are written in one pass, and divided afterwards."""
    prepared(tmp_path)
    datasets = []
    for name, encoding in (
        ("counted", "min_count = 1"),
        ("at-once", 'encoding = "hash"\nnum_buckets = 9'),
    ):
        schema = Schema.from_toml(SCHEMA.replace("min_count = 1", encoding))
        options = PrepareOptions(SplitRule.parse(split), piece_bytes=4096)
        source = TextSource(tmp_path / "clicks.csv", ",", True)
        prepare([source], schema, tmp_path / name, options)
        datasets.append(EncodedDataset.open(tmp_path / name))
    for part in ("train", "validation", "test"):
        one, other = (dataset.split(part) for dataset in datasets)
        for field in ("labels", "sample_weights", "groups"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        assert len(one)


def test_parquet_gives_the_same(tmp_path):
    prepared(tmp_path)
    schema = Schema.from_toml(SCHEMA)
    pl.read_csv(tmp_path / "clicks.csv").write_parquet(tmp_path / "clicks.parquet")
    source = ParquetSource(tmp_path / "clicks.parquet", schema)
    prepare([source], schema, tmp_path / "other", PrepareOptions())
    one, other = (EncodedDataset.open(tmp_path / name) for name in ("dataset", "other"))
    assert one.digest == other.digest


def test_one_label_by_a_table_is_stored_as_ever():
    piece = parsed("-1,a\n1,b\ntrue,c\nfalse,d\nmaybe,e\n", ONE, ("click", "item"))
    assert piece.labels.tolist() == [0, 1, 1, 0] and piece.labels.dtype == np.uint8
    assert piece.sample_weights is None and piece.groups is None
    assert piece.num_bad == 1 and piece.bad[0].line == 5
    assert "`maybe` as click, a label must be '-1', '1', 'true' or 'false'" in piece.bad[0].reason


@pytest.mark.parametrize(
    ("field", "place", "reason"),
    [
        ("1", 0, "a label must be 'no' or 'yes'"),
        ("", 1, "a label must be a finite number"),
        ("inf", 1, "a label must be a finite number"),
        ("1e300", 1, "a label must be a finite number of at most 1.8e"),
        ("-0.5", 2, "a weight must be a finite number of at least 0"),
        ("", 2, "a weight must be a finite number of at least 0"),
    ],
)
def test_what_is_no_label_or_weight_is_left_out(field, place, reason):
    fields = ["yes", "2.5", "1", "u1", "i1", "0.5"]
    fields[place] = field
    piece = parsed(",".join(fields) + "\n" + "no,-2,0,u1,i1,1\n")
    assert piece.num_bad == 1 and reason in piece.bad[0].reason
    assert piece.labels.tolist() == [[0, -2]] and piece.sample_weights.tolist() == [0]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_weights_have_a_mean_of_one_over_the_global_batch(tmp_path, num_ranks, shuffle):
    split = EncodedDataset.open(prepared(tmp_path)).split("train")
    parts = [
        list(Loader(split, 100, shuffle=shuffle, part=(rank, num_ranks)))
        for rank in range(num_ranks)
    ]
    whole = list(Loader(split, 100, shuffle=shuffle))
    assert len(whole) == 7
    for batch, *of_ranks in zip(whole, *parts, strict=True):
        for name in ("labels", "sample_weights", "groups"):
            joined = torch.cat([getattr(each, name) for each in of_ranks])
            assert torch.equal(joined, getattr(batch, name))
        assert batch.sample_weights.mean().item() == pytest.approx(1, rel=1e-6)
        assert batch.labels.shape == (batch.batch_size, 2)


def test_a_batch_without_any_weight_counts_nothing(tmp_path):
    split = EncodedDataset.open(prepared(tmp_path)).split("train")
    (first, *_) = Loader(split, 1)
    zero = int(np.flatnonzero(split.sample_weights == 0)[0])
    batches = list(Loader(split, 1))
    assert batches[zero].sample_weights.tolist() == [0] and first.batch_size == 1


def test_data_to_be_scored_need_neither(tmp_path):
    vocabularies = Vocabularies.of_dataset(EncodedDataset.open(prepared(tmp_path)))
    text = tmp_path / "tomorrow.csv"
    text.write_text("user,item,age\nu1,i1,0.5\nu2,i7,1.5\n")
    options = PrepareOptions(SplitRule.parse("test"), vocabularies=vocabularies, has_labels=False)
    prepare([TextSource(text, ",", True)], vocabularies.schema, tmp_path / "out", options)
    split = EncodedDataset.open(tmp_path / "out").split("test")
    assert split.labels.tolist() == [[0, 0], [0, 0]] and split.sample_weights.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("", "either `label` or `labels`"),
        ('label = "a"\nlabels = ["b"]', "either `label` or `labels`"),
        ('labels = ["a", "a"]', "each of `labels` once"),
        ('label = "a"\n[target.b]', "as [target.NAME] one of a, not b"),
        ('label = "a"\nweight = "a"', "columns that are no labels"),
        ('label = "x"', "which `x` would give away"),
        ('label = "a"\n[target.a]\nvalues = { yes = 2 }', "0 or 1 for 'yes'"),
    ],
)
def test_schemas_that_say_nothing_are_refused(head, problem):
    with pytest.raises(ConfigError) as refused:
        Schema.from_toml(f"{head}\n[categorical.x]\n")
    assert problem in str(refused.value)


def test_a_column_that_lacks_is_named():
    with pytest.raises(DataError, match="a column `importance`"):
        parsed("", columns=("click", "seconds", "user", "item", "age"))


def test_data_of_one_label_load_as_they_were_written_before(tmp_path):
    """A manifest of then knows of no labels but one."""
    folder = prepared(tmp_path, ONE.replace('"-1" = 0, "1" = 1, "true" = 1, "false" = 0', YES))
    manifest = json.loads((folder / "dataset.json").read_text())
    for key in ("labels", "target", "weight", "group"):
        del manifest["schema"][key]
    (folder / "dataset.json").write_text(json.dumps(manifest))
    dataset = EncodedDataset.open(folder)
    assert dataset.schema.label_columns == ("click",) and dataset.schema.is_binary
    split = dataset.split("train")
    assert split.labels.tolist() == [row[0] == "yes" for row in records()[:630]]
    assert (folder / "train" / "labels.u8").stat().st_size == 630
    (batch, *_) = Loader(split, 10)
    assert batch.labels.shape == (10,) and batch.sample_weights is None and batch.groups is None
