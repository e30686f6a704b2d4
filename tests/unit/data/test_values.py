"""What becomes of a typed value.

The same row in preparation and in serving, or a refusal that names it.
"""

import datetime as dt
import json
import uuid
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
import torch

from pibroch.data.dataset import EncodedDataset
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.values import is_list, text_of
from pibroch.errors import ConfigError, DataError

SCHEMA = (
    'label = "y"\n[categorical.v]\nmin_count = 1\n[categorical.bag]\nmulti_hot = true\nmin_count'
    " = 1\n"
)
MOMENT = dt.datetime(2024, 5, 6, 7, 8, 9)
TEXTS = [
    ("a|b", b"a|b"),
    (b"\xff", b"\xff"),
    (bytearray(b"12"), b"12"),
    (memoryview(b"12"), b"12"),
    (np.str_("é"), "é".encode()),
    (None, b""),
    (True, b"1"),
    (np.False_, b"0"),
    (-7, b"-7"),
    (10**30, b"1" + b"0" * 30),
    (np.uint64(2**64 - 1), b"18446744073709551615"),
    (torch.tensor(12), b"12"),
    (np.array(12.0), b"12"),
    (12.0, b"12"),
    (-0.0, b"0"),
    (np.float64(0.5), b"0.5"),
    (np.float32(3.9), b"3.9000000953674316"),
    (torch.tensor(3.9, dtype=torch.bfloat16), b"3.90625"),
    (1e16, b"1e+16"),
    (0.00001, b"0.00001"),
    (-1.5e-5, b"-0.000015"),
    (3.9e-7, b"3.9e-7"),
    (1e-10, b"1e-10"),
    (float("nan"), b""),
    (np.float32("nan"), b""),
    (float("inf"), b"inf"),
    (Decimal("12.50"), b"12.5"),
    (Decimal("100"), b"100"),
    (Decimal("-0.00"), b"0"),
    (Decimal("NaN"), b""),
    (dt.date(2024, 5, 6), b"2024-05-06"),
    (dt.time(7, 8, 9, 500), b"07:08:09.000500"),
    (MOMENT, b"2024-05-06T07:08:09"),
    (MOMENT.replace(tzinfo=dt.timezone(dt.timedelta(hours=2))), b"2024-05-06T05:08:09+00:00"),
    (np.datetime64("2024-05-06"), b"2024-05-06"),
    (np.datetime64("2024-05-06T07"), b"2024-05-06T07:00:00"),
    (np.datetime64("2024-05-06T07:08:09.600"), b"2024-05-06T07:08:09.600000"),
    (np.datetime64("2024-05-06T07:08:09.000000001"), b"2024-05-06T07:08:09.000000001"),
    (np.datetime64("NaT"), b""),
]


@pytest.mark.parametrize(
    ("value", "text"), TEXTS, ids=[f"{type(v).__name__} {t!r}" for v, t in TEXTS]
)
def test_the_text_of_a_value(value, text):
    assert text_of(value) == text
    assert not is_list(value)


def prepared(folder, frame=None, toml=SCHEMA, text=None):
    schema = Schema.from_toml(toml)
    if text is None:
        frame.write_parquet(folder / "t.parquet")
        source = ParquetSource(folder / "t.parquet", schema)
    else:
        (folder / "t.csv").write_text(text, encoding="utf-8")
        source = TextSource(folder / "t.csv", schema.separator, schema.quotes, schema.columns)
    options = PrepareOptions(SplitRule.parse("none"), overwrite=True)
    prepare([source], schema, folder / "set", options)
    return EncodedDataset.open(folder / "set")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A dataset that knows the words 12, a and b."""
    return prepared(tmp_path_factory.mktemp("words"), text="y,v,bag\n1,12,a|b\n0,a,\n1,b,a\n")


def rows_of(dataset, v, bag):
    batch = batch_from_raw(dataset.schema, dataset.encoders, {"v": [v], "bag": [bag]})
    return batch.values.tolist()


@pytest.mark.parametrize(
    "bag",
    [("a", "b"), {"a": 0, "b": 1}.keys(), np.array(["a", "b"]), pl.Series(["a", "b"])],
    ids=lambda bag: type(bag).__name__,
)
def test_whatever_holds_several_values_is_a_list(words, bag):
    assert rows_of(words, "a", bag) == rows_of(words, "a", "a|b")


def test_sets_and_tensors_are_lists(words):
    assert sorted(rows_of(words, "a", {"a", "b"})) == sorted(rows_of(words, "a", "a|b"))
    assert rows_of(words, "a", torch.tensor([12, 7])) == rows_of(words, "a", "12|7")
    assert rows_of(words, torch.tensor(12), []) == rows_of(words, "12", None)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1},
        print,
        object(),
        dt.timedelta(1),
        np.timedelta64(1, "s"),
        1j,
        uuid.UUID(int=1),
        [1],
        torch.zeros(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_single_value_is_refused_by_name(words, value):
    columns = {"v": ["a", value], "bag": ["", ""]}
    with pytest.raises(
        DataError, match=r"got a \w+ as v of sample 1; need one value: text, .*do: "
    ):
        batch_from_raw(words.schema, words.encoders, columns)
    columns = {"v": ["a", "a"], "bag": [["a", "b"], ["a", value]]}
    with pytest.raises(DataError, match=r"got a \w+ as bag of sample 1"):
        batch_from_raw(words.schema, words.encoders, columns)


def test_a_missing_number_of_a_column_is_missing_everywhere(tmp_path):
    toml = 'label = "y"\n[dense.n]\n[categorical.n]\nmin_count = 1\n'
    frame = pl.DataFrame({"y": [0, 1, 1], "n": [float("nan"), None, 2.0]})
    dataset = prepared(tmp_path, frame, toml)
    split = dataset.split("train")
    assert split.ids[:, 0].tolist() == [1, 1, 2] and split.dense[:2, 0].tolist() == [0, 0]
    batch = batch_from_raw(dataset.schema, dataset.encoders, {"n": [float("nan"), None, 2]})
    assert batch.values.tolist() == [1, 1, 2]
    assert np.array_equal(batch.dense.numpy(), split.dense)


def test_characters_are_counted_in_characters(tmp_path):
    toml = 'label = "y"\n[categorical.v]\nmin_count = 1\ncharacters = [1, 2]\n'
    names = ["北京", "吉京", "éab", "xaé", "x", "", "😀b"]
    text = "y,v\n" + "".join(f"{place % 2},{name}\n" for place, name in enumerate(names))
    dataset = prepared(tmp_path, toml=toml, text=text)
    rows = dataset.split("train").ids[:, 0]
    assert rows[0] == rows[1] and rows[2] == rows[3] and rows[4] == rows[5] == 1
    assert len(set(rows.tolist())) == 4
    batch = batch_from_raw(dataset.schema, dataset.encoders, {"v": names})
    assert batch.values.tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[categorical.a]\ncharacters = [-2, -1]", "`characters` of `a`"),
        ("[categorical.a]\ncharacters = [2, 2]", "`characters` of `a`"),
        ('[categorical.a]\nmulti_hot = true\ndelimiter = "§"', "`delimiter` of `a` one ASCII"),
        ('[categorical.a]\nmulti_hot = true\ndelimiter = "\\n"', "`delimiter` of `a` one ASCII"),
        ("[categorical.a]\nmulti_hot = true\ndelimiter = '\"'", "`delimiter` of `a` one ASCII"),
        ('[categorical.a]\nmulti_hot = true\ndelimiter = ","', "not the `separator`"),
        ('separator = "¦"\n[categorical.a]', "`separator` one ASCII"),
        ('separator = "\\r"\n[categorical.a]', "`separator` one ASCII"),
        ("[categorical.y]", "the label `y`, which `y` would give away"),
        ('[categorical.a]\n[dense.b]\ncolumn = "y"', "the label `y`, which `b` would give away"),
    ],
)
def test_schemas_that_would_read_other_bytes_are_refused(line, message):
    with pytest.raises(ConfigError, match=message):
        Schema.from_toml(f'label = "y"\n{line}\n')


def test_what_was_prepared_by_the_first_rules_keeps_them(tmp_path):
    frame = pl.DataFrame({"y": [0, 1, 1], "v": [12.0, float("nan"), 1e-5], "bag": [["é1"], [], []]})
    toml = SCHEMA + "characters = [0, 2]\n"
    numeric = Schema.from_toml('text_rules = 1\nlabel = "y"\n[categorical.n]\nbinning = "log"\n')
    with pytest.raises(DataError, match="`nan` as n of sample 0"):
        batch_from_raw(numeric, {}, {"n": [float("nan")]})
    new = prepared(tmp_path, frame, toml)
    assert new.schema.text_rules == 2 and rows_of(new, 12, [])[:1] == rows_of(new, 12.0, [])[:1]
    old = prepared(tmp_path, frame, "text_rules = 1\n" + toml)
    manifest = tmp_path / "set" / "dataset.json"
    content = json.loads(manifest.read_text())
    del content["schema"]["text_rules"]
    manifest.write_text(json.dumps(content))
    old = EncodedDataset.open(tmp_path / "set")
    assert old.schema.text_rules == 1
    trained = old.split("train").ids[:, 0].tolist()
    for value, row in zip((12.0, float("nan"), 1e-5), trained, strict=True):
        assert row > 1 and rows_of(old, value, [])[0] == row
    assert rows_of(old, 12, [])[0] == 0, "a whole number was another value"
    assert rows_of(old, "a", ["é2"])[1:] == rows_of(old, "a", ["é1"])[1:], (
        "two bytes, one character"
    )
    assert rows_of(new, "a", ["é2"])[1:] != rows_of(new, "a", ["é1"])[1:]
