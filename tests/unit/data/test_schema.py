import pytest

from pibroch.data.presets import avazu_schema, criteo_schema
from pibroch.data.schema import CategoricalFeature, Schema
from pibroch.data.transform import NUM_LOG_BIN_ROWS
from pibroch.errors import ConfigError, DataError

AVAZU = ["id", "click", "hour", "C1", "site_id"]


@pytest.mark.parametrize("bins", [True, False])
def test_toml_reads_back_to_the_same_schema(bins):
    schema = criteo_schema(bins=bins, min_count=5)
    assert Schema.from_toml(schema.to_toml()) == schema


def test_criteo_has_39_categories_with_bins_and_26_without():
    assert len(criteo_schema().categorical) == 39
    assert len(criteo_schema(bins=False).categorical) == 26
    assert len(criteo_schema().dense) == 13
    assert criteo_schema().used_columns() == criteo_schema().columns


def test_avazu_takes_the_hour_of_day_and_drops_the_id():
    schema = avazu_schema(AVAZU, ["1", "0", "14102103", "1005", "ab"])
    assert schema.keys == ("hour", "C1", "site_id")
    assert schema.categorical[0].characters == (6, 8)
    assert avazu_schema(AVAZU, ["1", "0", "03", "1005", "ab"]).categorical[0].characters is None
    assert schema.dense == ()


def test_avazu_refuses_other_headers():
    with pytest.raises(DataError, match="click"):
        avazu_schema(["a", "b"], [])


def test_feature_tables_are_read_from_toml():
    schema = Schema.from_toml(
        'label = "y"\n[dense.price]\n[categorical.user]\ncolumn = "user id"\nencoding ='
        ' "hash"\nnum_buckets = 7\n[categorical.age]\nbinning ='
        ' "log"\n[categorical.tags]\nmulti_hot = true\ndelimiter = ";"\n'
    )
    assert schema.dense_names == ("price",)
    assert [f.fixed_num_rows for f in schema.categorical] == [9, NUM_LOG_BIN_ROWS, None]
    assert schema.used_columns() == ("y", "price", "user id", "age", "tags")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label = ", "no TOML"),
        ('label = "y"\n', "at least one categorical"),
        ('label = "y"\n[categorical.a]\nmincount = 3\n', "min_count"),
        ('label = "y"\n[categorical.a]\nencoding = "hash"\n', "num_buckets"),
        ('label = "y"\n[categorical."a b"]\n', "a b"),
        ('label = "y"\n[categorical]\na = 1\n', "holds no tables"),
        ('label = "y"\n[categorical.a]\nmin_count = 0\n', "min_count"),
        ('label = "y"\n[categorical.a]\nbinning = "log"\nmulti_hot = true\n', "not both"),
    ],
)
def test_wrong_toml_names_the_mistake(text, message):
    with pytest.raises(ConfigError, match=message):
        Schema.from_toml(text)


def test_a_missing_schema_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="nope"):
        Schema.load(tmp_path / "nope.toml")


def test_changes_from_the_command_line():
    schema = criteo_schema().with_changes(min_count=9, hash_buckets={"C3": 100, "I1_bin": 50})
    by_name = {feature.name: feature for feature in schema.categorical}
    assert by_name["C1"].min_count == 9
    assert by_name["C3"].fixed_num_rows == 102
    assert by_name["I1_bin"].fixed_num_rows == 52
    with pytest.raises(ConfigError, match="C99"):
        schema.with_changes(hash_buckets={"C99": 5})


def test_features_may_share_a_column_but_not_a_name():
    feature = CategoricalFeature(name="a", column="x")
    assert Schema(
        label="y", categorical=(feature, CategoricalFeature(name="b", column="x"))
    ).used_columns() == (
        "y",
        "x",
    )
    with pytest.raises(ValueError, match="two categorical"):
        Schema(label="y", categorical=(feature, feature))


def test_a_byte_order_mark_is_no_part_of_a_schema(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text('label = "y"\n[categorical.a]\n', encoding="utf-8-sig")
    assert Schema.load(path).keys == ("a",)
