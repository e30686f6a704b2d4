"""What users promise of their files, and the code can check for nothing: it does, and says so."""

import polars as pl
import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.health import warnings
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import DataError

DAY = 86_400
TIMED = 'label = "y"\ntime = "at"\n[categorical.u]\n'
EVENTS = """
label = "y"
[categorical.item]
[categorical.history]
multi_hot = true
max_length = 5
shares = "item"
events = { item = "item", user = "u" }
"""


def day(folder, number, start=1_700_000_000, unit=1):
    path = folder / f"day{number}.csv"
    times = (start + DAY * number + 60 * n for n in range(300))
    lines = [f"{n % 3 // 2},u{n % 9},{time * unit},i{n % 7}" for n, time in enumerate(times)]
    path.write_text("y,u,at,item\n" + "\n".join(lines) + "\n")
    return path


def prepared(schema, paths, out, **options):
    schema = Schema.from_toml(schema)
    sources = [TextSource(path, ",", True, schema.columns) for path in paths]
    report = prepare(sources, schema, out, PrepareOptions(**options))
    return report.warnings


def test_a_split_by_time_of_files_in_another_order_is_told(tmp_path):
    days = [day(tmp_path, number) for number in (1, 2)]
    assert not prepared(TIMED, days, tmp_path / "right")
    wrong = prepared(TIMED, days[::-1], tmp_path / "wrong")
    assert len(wrong) == 2 and "records are not in the order of time" in wrong[1]
    assert "a training and a test sample" in wrong[1] and "of 71.4% of all pairs" in wrong[1]
    assert tuple(warnings(EncodedDataset.open(tmp_path / "wrong"))) == wrong
    for place, split in enumerate(("hash:0.7/0.15/0.15", "none")):
        rule = SplitRule.parse(split)
        assert not prepared(TIMED, days[::-1], tmp_path / f"{place}", split=rule)


def test_one_wrong_clock_and_a_log_of_many_writers_are_in_order(tmp_path):
    """Neighbours are exchanged within twenty records, and a test sample has no time."""
    numbers = [n // 20 * 20 + (n % 20) * 7 % 20 for n in range(8000)]
    times = [1_700_000_000 + n for n in numbers]
    times[-3] = 0
    lines = [f"{n % 3 // 2},u{n % 9},{time}" for n, time in enumerate(times)]
    (tmp_path / "a.csv").write_text("y,u,at\n" + "\n".join(lines) + "\n")
    assert not prepared(TIMED, [tmp_path / "a.csv"], tmp_path / "out")


@pytest.mark.parametrize(("declared", "unit", "other"), [("s", 1000, "ms"), ("ms", 1, "s")])
def test_times_in_another_unit_are_told(tmp_path, declared, unit, other):
    schema = TIMED.replace("[cat", f'time_unit = "{declared}"\n[cat')
    (told,) = prepared(schema, [day(tmp_path, 1, unit=unit)], tmp_path / "out")
    assert f"read in {declared}, but seems to be in {other}" in told
    assert not prepared(TIMED, [day(tmp_path, 2, start=0)], tmp_path / "relative")
    of_hours = 'label = "y"\n[categorical.hour]\ncolumn = "at"\nbinning = "hour"\n'
    told = prepared(of_hours, [day(tmp_path, 3, unit=1000)], tmp_path / "hours")
    assert told and "write seconds" in told[0]


@pytest.mark.parametrize("multi_hot", ["true", "false"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_lists_written_as_text_are_told(tmp_path, multi_hot, kind):
    schema = f'label = "y"\n[categorical.u]\n[categorical.tags]\nmulti_hot = {multi_hot}\n'
    schema = Schema.from_toml(schema)
    tags = [f"[{n % 4}, {n % 5}]" if n % 3 else "" for n in range(300)]
    frame = pl.DataFrame({"y": [0, 1] * 150, "u": [f"[{n % 3}" for n in range(300)], "tags": tags})
    path = tmp_path / f"a.{kind}"
    (frame.write_csv if kind == "csv" else frame.write_parquet)(path)
    source = TextSource(path, ",", True) if kind == "csv" else ParquetSource(path, schema)
    report = prepare([source], schema, tmp_path / "out", PrepareOptions(piece_bytes=1024))
    (told,) = report.warnings
    assert "`tags`: `[1, 1]` is a list written as text" in told and "between `|`" in told


def test_histories_that_begin_anew_are_told(tmp_path):
    days = [day(tmp_path, number) for number in (1, 2)]
    assert not prepared(EVENTS, days[:1], tmp_path / "trained")
    known = Vocabularies.of_dataset(EncodedDataset.open(tmp_path / "trained"))
    rule = SplitRule.parse("test")
    (told,) = prepared(EVENTS, days[1:], tmp_path / "new", vocabularies=known, split=rule)
    assert "`history`: histories begin anew" in told
    rule = SplitRule("files", files=(1, 0, 1))
    assert not prepared(EVENTS, days, tmp_path / "both", vocabularies=known, split=rule)
    lengths = EncodedDataset.open(tmp_path / "both").split("test").bags["history"].offsets
    assert lengths[1] == 5, "what the user did the day before"


def test_a_header_where_the_schema_names_the_columns_is_refused(tmp_path):
    schema = 'label = "y"\ncolumns = ["y", "u", "at", "item"]\n[categorical.u]\n'
    with pytest.raises(DataError, match="whose first line has the names of the columns"):
        prepared(schema, [day(tmp_path, 1)], tmp_path / "out")


def test_a_file_that_trains_and_tests_is_refused(tmp_path):
    path = day(tmp_path, 1)
    (tmp_path / "link.csv").symlink_to(path)
    with pytest.raises(DataError, match="both as train and as test data"):
        rule = SplitRule("files", files=(1, 0, 1))
        prepared(TIMED, [path, tmp_path / "link.csv"], tmp_path / "out", split=rule)
