"""Each sample's line in its file, and columns that are passed through, for files of scores."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.data import line_runs
from pibroch.data.dataset import EncodedDataset
from pibroch.data.line_runs import LineRuns, places_of
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SPLITS, SplitRule
from pibroch.data.storage import ArrayFile
from pibroch.errors import DataError

SCHEMA = 'label = "y"\nnulls = ["-"]\n[dense.x]\n[categorical.u]\nencoding = "{encoding}"\n'
SIZES = 47, 30


def lines(first):
    """Lines, of which some are malformed, blank, or two."""
    for number in range(first, first + SIZES[first > 0]):
        x = "bad" if number % 13 == 5 else f"{number}"
        note = f'"two\nlines {number}"' if number % 7 == 3 else "-" if number % 7 == 4 else "é"
        yield f"{number % 2},u{number % 5},{x},id{number},{note}"
        if number % 11 == 2:
            yield ""


def schema(encoding="raw"):
    return Schema.from_toml(SCHEMA.format(encoding=encoding))


def prepared(folder, name, encoding="raw", **options):
    """Of two files."""
    paths = [folder / "a.csv", folder / "b.csv"]
    for path, first in zip(paths, (0, SIZES[0]), strict=True):
        path.write_text("y,u,x,id,note\n" + "\n".join(lines(first)) + "\n")
    options = {"max_bad_fraction": 0.2, "keep": ("id", "note"), "piece_bytes": 256} | options
    given = PrepareOptions(**options)
    report = prepare(
        [TextSource(path, ",", True) for path in paths], schema(encoding), folder / name, given
    )
    assert report.num_bad
    dataset = EncodedDataset.open(folder / name)
    dataset.verify()
    return dataset


@pytest.mark.parametrize("encoding", ["raw", "vocabulary"])
@pytest.mark.parametrize("split", ["time:0.5/0.3/0.2", "hash:0.5/0.3/0.2", "files"])
def test_each_sample_has_the_line_that_it_stood_in(tmp_path, encoding, split):
    rule = SplitRule.parse(split) if split != "files" else SplitRule("files", files=(1, 0, 1))
    dataset = prepared(tmp_path, "out", encoding, split=rule)
    assert dataset.sources == (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))
    texts = [(tmp_path / name).read_text().split("\n") for name in ("a.csv", "b.csv")]
    ids = []
    for name in SPLITS:
        part = dataset.split(name)
        count = len(part)
        if not count:
            continue
        ids += part.kept["id"].between(0, count)
        assert part.kept["id"].between(2, 5) == part.kept["id"].between(0, count)[2:5]
        for (source, line), kept, note, x in zip(
            places_of(part.lines, 0, count).tolist(),
            part.kept["id"].between(0, count),
            part.kept["note"].between(0, count),
            part.dense[:, 0].tolist(),
            strict=True,
        ):
            assert f",{kept}," in texts[source][line - 1]
            number = int(kept.removeprefix("id"))
            assert x == pytest.approx(np.log1p(number))
            expected = (
                f"two\nlines {number}" if number % 7 == 3 else "-" if number % 7 == 4 else "é"
            )
            assert note == expected
    assert sorted(ids) == sorted(f"id{n}" for n in range(sum(SIZES)) if n % 13 != 5)


def test_rows_of_parquet_are_counted_from_one_and_kept_as_text(tmp_path):
    frame = pl.DataFrame({"y": [0, 1, 1], "u": ["a", "b", "c"], "x": [1.0, 2.0, 3.0]})
    frame = frame.with_columns(id=pl.Series([7, None, 9]), tags=pl.Series([["a"], ["b"], []]))
    frame.write_parquet(tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet", schema(), kept=("id",))
    options = PrepareOptions(SplitRule.parse("none"), keep=("id",))
    prepare([source], schema(), tmp_path / "out", options)
    train = EncodedDataset.open(tmp_path / "out").split("train")
    assert places_of(train.lines, 0, 3).tolist() == [[0, 1], [0, 2], [0, 3]]
    assert train.kept["id"].between(0, 3) == ["7", "", "9"]
    with pytest.raises(DataError, match="which holds lists, for --keep"):
        ParquetSource(tmp_path / "a.parquet", schema(), kept=("tags",))


@pytest.mark.parametrize(
    ("keep", "got"),
    [
        (("line",), "--keep line, a name"),
        (("id", "id"), "--keep id"),
        (("none",), "a column `none`"),
    ],
)
def test_columns_that_cannot_be_kept(tmp_path, keep, got):
    with pytest.raises(DataError, match=got):
        prepared(tmp_path, "out", keep=keep)


def test_lines_alone_do_not_change_the_digest_of_the_data(tmp_path):
    clean = "".join(f"{n % 2},u{n},{n}\n" for n in range(20))
    digests = []
    for name, text in (("a", clean), ("b", clean.replace("\n1", "\n\n1"))):
        (tmp_path / f"{name}.csv").write_text("y,u,x\n" + text)
        source = TextSource(tmp_path / f"{name}.csv", ",", True)
        prepare([source], schema(), tmp_path / name, PrepareOptions(SplitRule.parse("none")))
        digests.append(EncodedDataset.open(tmp_path / name))
    one, other = digests
    assert one.digest == other.digest and one.sources_digest != other.sources_digest


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 1)]), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.integers(1, 3),
)
def test_runs_are_cut_and_moved_as_their_samples(tmp_path_factory, steps, borders, block_runs):
    places = np.cumsum(steps, 0)
    step, validation, test = (min(border, len(places)) for border in borders)
    validation, test = sorted((validation, test))
    folder = tmp_path_factory.mktemp("runs")
    runs = [LineRuns(ArrayFile(folder / name, "i8"), 0) for name in SPLITS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_runs, "_BLOCK_RUNS", block_runs)
        for first in range(0, len(places), step or 1):
            runs[0].append(first, places[first : first + (step or 1)])
        jumps = (np.diff(places, axis=0) != (0, 1)).any(1)
        assert runs[0].count == 1 + jumps.sum()
        runs[0].move(validation, test, runs[1])
        runs[0].move(test, len(places), runs[2])
        runs[0].cut(validation)
    parts = (0, validation), (validation, test), (test, len(places))
    for each, (first, end) in zip(runs, parts, strict=True):
        of_split = each._read(0, each.count)
        assert (
            len(of_split) == 0
            if first == end
            else places_of(of_split, 0, end - first).tolist() == places[first:end].tolist()
        )
