import polars as pl
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.layout import ITEM_END
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import Place
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError

SCHEMA = Schema.from_toml(
    'label = "y"\nseparator = "\\t"\nquotes = false\n[dense.n]\n[categorical.c]\nmin_count = 1\n'
    "[categorical.l]\nmulti_hot = true\nmin_count = 1\n"
)
FRAME = pl.DataFrame(
    {
        "y": [True, False, False, True],
        "n": [1.5, None, 3.0, 2.0],
        "c": ['a"b', "c,d", None, "e\nf"],
        "l": [["p|q", "r"], [], None, ["", None, "r"]],
        "other": [{"a": 1}] * 4,
    }
)


def prepared(tmp_path, frame, schema=SCHEMA):
    frame.write_parquet(tmp_path / "data.parquet")
    source = ParquetSource(tmp_path / "data.parquet", schema)
    out = tmp_path / "out"
    prepare(
        [source],
        schema,
        out,
        PrepareOptions(split=SplitRule.parse("none"), piece_bytes=256 * 3, overwrite=True),
    )
    return EncodedDataset.open(out)


def test_a_table_becomes_text_of_the_columns_that_are_used(tmp_path):
    FRAME.write_parquet(tmp_path / "data.parquet")
    source = ParquetSource(tmp_path / "data.parquet", SCHEMA)
    assert source.columns == ("y", "n", "c", "l")
    assert source.layout.lists == {"l"} and source.layout.unit == "row"
    text = "".join(piece.text.decode() for piece in source.pieces(Place(), 1))
    assert text == '1,1.5,"a""b",p|q\x1fr\x1f\n0,,"c,d",""\n0,3,,\n1,2,"e\nf",\x1f\x1fr\x1f\n'
    assert [piece.start.line for piece in source.pieces(Place(2, 2), 1)] == [2, 3]


def test_items_of_lists_stay_what_they_are(tmp_path):
    split = prepared(tmp_path, FRAME).split("train")
    bags = split.bags["l"]
    assert bags.offsets.tolist() == [0, 2, 2, 2, 5]
    assert bags.values[0] != bags.values[1] == bags.values[4]
    assert bags.values[2:4].tolist() == [1, 1], "an empty item and a null are missing values"
    assert split.ids[3, 0] > 1, "a newline inside a value"


def test_serving_reads_the_same_lists_alike(tmp_path):
    dataset = prepared(tmp_path, FRAME)
    columns = FRAME.select("n", "c", "l").to_dict(as_series=False)
    batch = batch_from_raw(dataset.schema, dataset.encoders, columns)
    bags = dataset.split("train").bags["l"]
    assert batch.select(("l",)).values.tolist() == bags.values.tolist()
    assert batch.select(("l",)).offsets.tolist() == bags.offsets.tolist()
    with pytest.raises(DataError, match="a list as c of sample 0"):
        batch_from_raw(dataset.schema, dataset.encoders, columns | {"c": [["a"], "b", "c", "d"]})


@pytest.mark.parametrize(
    "kind", [pl.Int32, pl.Float64, pl.Boolean, pl.Binary, pl.Null, pl.Categorical]
)
def test_lists_and_columns_of_all_plain_types(tmp_path, kind):
    one = {pl.Null: None, pl.Binary: "1", pl.Categorical: "1"}.get(kind, 1)
    values = pl.Series([one, None]).cast(kind)
    frame = pl.DataFrame({"y": [0, 1], "n": [1, 2], "c": values, "l": [values, values]})
    split = prepared(tmp_path, frame).split("train")
    row = 1 if kind == pl.Null else 2
    assert split.ids[:, 0].tolist() == [row, 1]
    assert split.bags["l"].values.tolist() == [row, 1] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"c": pl.Series([["a"]] * 4)},
            "column `c` of .*, which holds lists, for c; need one value a row",
        ),
        ({"n": pl.Series([[1.0]] * 4)}, "holds lists, for n"),
        ({"y": pl.Series([[1]] * 4)}, "holds lists, for the label"),
        ({"l": pl.Series([[["a"]]] * 4)}, r"column `l` of .*, which holds List\(List"),
        ({"l": pl.Series([[{"a": 1}]] * 4)}, r"column `l` of .*, which holds List\(Struct"),
        ({"c": pl.Series([{"a": 1}] * 4)}, r"column `c` of .*, which holds Struct"),
        ({"c": pl.Series([1] * 4).cast(pl.Duration)}, "column `c` of .*, which holds Duration"),
        ({"c": pl.Series([b"\xff"] * 4)}, "no text in c of .* rows 1 to 3; need UTF-8"),
        (
            {"l": pl.Series([["a"]] * 3 + [["a", f"b{ITEM_END}c"]])},
            r"an item of `l` in row 4 of .*U\+001F",
        ),
        ({"y": pl.Series([0, 1, 2, 0])}, "data.parquet row 3: `2` as y"),
        ({"n": pl.Series([1.0, float("inf"), 1.0, 1.0])}, "data.parquet row 2: `inf` as n"),
    ],
)
def test_what_no_feature_can_read_is_named(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, FRAME.with_columns(**change))


def test_a_newline_in_a_value_does_not_move_the_place_of_a_bad_row(tmp_path):
    frame = FRAME.with_columns(y=pl.Series([1, 0, 1, 5]), c=pl.Series(["a\nb\nc", "d", "e", "f"]))
    with pytest.raises(DataError, match="row 4: `5` as y"):
        prepared(tmp_path, frame)


def test_a_part_without_rows_adds_none(tmp_path):
    FRAME.clear().write_parquet(tmp_path / "part-0.parquet")
    FRAME.write_parquet(tmp_path / "part-1.parquet")
    sources = [ParquetSource(tmp_path / f"part-{part}.parquet", SCHEMA) for part in (0, 1, 0)]
    options = PrepareOptions(split=SplitRule.parse("none"))
    prepare(sources, SCHEMA, tmp_path / "parts", options)
    whole = prepared(tmp_path, FRAME).split("train")
    parts = EncodedDataset.open(tmp_path / "parts").split("train")
    assert parts.ids.tolist() == whole.ids.tolist() and parts.labels.tolist() == [1, 0, 0, 1]


def test_what_is_no_parquet_is_refused(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"x,y\n1,2\n")
    with pytest.raises(DataError, match="need a sound Parquet file"):
        ParquetSource(path, SCHEMA)
    with pytest.raises(DataError, match="no records in"):
        prepared(tmp_path, FRAME.clear())
    with pytest.raises(DataError, match="the columns y, n, l, other; need a column `c`"):
        prepared(tmp_path, FRAME.drop("c"))
