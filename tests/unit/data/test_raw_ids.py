"""Raw ids: kept as keys that are hashes of texts, in one pass, beside features with rows."""

import gzip

import numpy as np
import pytest

from pibroch.data import EncodedDataset, Loader, health
from pibroch.data.encode import MISSING_KEY, Encoders, FeatureEncoder
from pibroch.data.kernels.text import naive
from pibroch.data.loader import batch_of
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_schema
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SPLITS, SplitRule
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.data.vocabularies import Vocabularies
from pibroch.data.writer import DatasetWriter
from pibroch.errors import ConfigError, DataError
from pibroch.planner.count import count_dataset

RAW = criteo_schema().with_changes(raw=True)
MIXED = Schema.from_toml(
    'label = "y"\n'
    '[categorical.user]\nencoding = "raw"\n'
    '[categorical.city]\nencoding = "hash"\nnum_buckets = 50\n'
    '[categorical.tags]\nencoding = "raw"\nmulti_hot = true\n'
    '[categorical.item]\nencoding = "raw"\n'
    '[categorical.days]\nencoding = "integer"\nnum_buckets = 9\nmulti_hot = true\n'
    '[categorical.last]\ncolumn = "tags"\nshares = "item"\nmulti_hot = true\nmax_length = 1\n'
)


def key(text: str) -> int:
    return naive.hash_fields([text.encode()])[0] >> 1


def contents(path, *names):
    """Files of a dataset by their names in it, all but the manifest."""
    files = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.glob("*/*"))}
    return {name: files[name] for name in names or files}


def mixed_lines(count):
    """Of two users in three the name, a city, some tags, an item, some days."""
    rng = np.random.default_rng(count)
    lines = ["y,user,city,tags,item,days"]
    for i in range(count):
        tags = "|".join(f"t{tag}" for tag in rng.integers(0, 30, rng.integers(0, 4)))
        days = "|".join(str(day) for day in rng.integers(0, 9, rng.integers(0, 3)))
        user = f"u{rng.integers(100)}" * bool(rng.integers(3))
        lines.append(f"{i % 2},{user},c{rng.integers(9)},{tags},{rng.integers(2**60)},{days}")
    return lines


def prepare_mixed(folder, lines, split="time", schema=MIXED, **options):
    path = folder / "mixed.csv"
    path.write_text("\n".join(lines))
    source = TextSource(path, schema.separator, schema.quotes, schema.columns)
    options = PrepareOptions(SplitRule.parse(split), piece_bytes=700, **options)
    report = prepare([source], schema, folder / "set", options)
    return EncodedDataset.open(folder / "set"), report


def test_the_key_of_a_missing_value_is_that_of_the_empty_text():
    assert key("") == MISSING_KEY == 8640173135264257171


def test_keys_of_a_log_are_hashes_of_its_texts(prepare_criteo, criteo_file, criteo_lines, tmp_path):
    stages = set()
    source = TextSource(criteo_file, RAW.separator, RAW.quotes, RAW.columns)
    options = PrepareOptions(piece_bytes=20_000)
    report = prepare([source], RAW, tmp_path / "raw", options, lambda stage, _: stages.add(stage))
    assert stages == {"parse"}, "one pass"
    prepare_criteo(criteo_file)
    raw, plain = (EncodedDataset.open(tmp_path / name) for name in ("raw", "dataset"))
    raw.verify()
    assert report.samples == raw.samples == plain.samples
    records = [line.split("\t") for line in criteo_lines]
    after = 0
    for name in SPLITS:
        split = raw.split(name)
        first, after = after, after + len(split)
        texts = [record[14:] for record in records[first:after]]
        assert split.raw_ids.tolist() == [[key(text) for text in each] for each in texts]
        assert split.raw_keys == raw.schema.keys[:26]
        bins = plain.split(name).ids[:, 26:]
        assert np.array_equal(split.ids, bins)
        names = [f"{name}/labels.u8", f"{name}/dense.f32"]
        assert contents(raw.path, *names) == contents(plain.path, *names)
    tables = [f"tables/{name}.counts.i64" for name in raw.schema.keys[26:]]
    assert contents(raw.path, *tables) == contents(plain.path, *tables)
    assert raw.num_rows == dict.fromkeys(raw.schema.keys[:26]) | {
        name: plain.num_rows[name] for name in plain.schema.keys[26:]
    }
    assert not (tmp_path / "raw" / "tables" / "C1.counts.i64").exists()
    missing = sum(record[14] == "" for record in records[:1400])
    shares = health.shares(raw)
    assert shares["C1"] == health.Shares(1400, 0.0, missing / 1400)
    assert shares["I1_bin"] == health.shares(plain)["I1_bin"]
    assert health.shares(plain)["C1"].missing == shares["C1"].missing


@pytest.mark.parametrize("split", ["time:0.5/0.3/0.2", "hash", "none", "time:0.2/0/0.8"])
def test_batches_hold_keys_and_rows_side_by_side(tmp_path, split):
    lines = mixed_lines(101)
    dataset, report = prepare_mixed(tmp_path, lines, split)
    dataset.verify()
    assert (
        report.num_rows
        == dataset.num_rows
        == {
            "user": None,
            "city": 52,
            "tags": None,
            "item": None,
            "days": 11,
        }
    )
    header, *records = [line.split(",") for line in lines]
    columns = {name: [record[i] for record in records] for i, name in enumerate(header)}
    whole = batch_from_raw(dataset.schema, dataset.encoders, columns)
    where = SplitRule.parse(split).assign(0, 101, 101)
    assert report.samples == {name: int((where == i).sum()) for i, name in enumerate(SPLITS)}
    user = whole.select(("user",)).values.tolist()
    assert user == [key(text) for text in columns["user"]] and MISSING_KEY in user
    for i, name in enumerate(SPLITS):
        numbers = np.flatnonzero(where == i)
        batch = batch_of(dataset.split(name), np.arange(len(numbers)))
        for feature in dataset.schema.keys:
            one = batch.select((feature,))
            expected = whole.select((feature,))
            bags = np.split(expected.values.numpy(), expected.offsets.numpy()[1:-1])
            wanted = [bags[number] for number in numbers]
            assert one.values.tolist() == [id_ for bag in wanted for id_ in bag.tolist()]
            assert one.lengths().tolist() == [len(bag) for bag in wanted]
        assert batch.labels.tolist() == [float(number % 2) for number in numbers]
    counts = sum(dataset.access_counts("days").tolist())
    assert counts == len(dataset.split("train").bags["days"].values)
    shuffled = Loader(dataset.split("train"), 7, shuffle=True, seed=3)
    seen = sorted(id_ for batch in shuffled for id_ in batch.select(("item",)).values.tolist())
    items = whole.select(("item",)).values.numpy()
    assert seen == sorted(items[where == 0].tolist())


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("kind", ["time", "hash"])
def test_cut_off_it_goes_on_to_the_same_bits(tmp_path, monkeypatch, pieces, kind):
    lines = mixed_lines(200)
    (tmp_path / "whole").mkdir()
    prepare_mixed(tmp_path / "whole", lines, kind)
    seen = []

    class CutOff(Exception):
        pass

    def cut_off(*_, **__):
        seen.append(1)
        if len(seen) == pieces:
            raise CutOff

    path = tmp_path / "mixed.csv"
    path.write_text("\n".join(lines))
    source = TextSource(path, MIXED.separator, MIXED.quotes, MIXED.columns)
    options = PrepareOptions(SplitRule.parse(kind), piece_bytes=700)
    with pytest.raises(CutOff):
        prepare([source], MIXED, tmp_path / "set", options, cut_off)
    for step in ("divide", "count_rows", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(DatasetWriter, step, cut_off)
            seen.clear()
            seen += [1] * (pieces - 1)
            if step != "divide" or kind == "time":
                with pytest.raises(CutOff):
                    prepare([source], MIXED, tmp_path / "set", options)
    parsed = []
    prepare([source], MIXED, tmp_path / "set", options, lambda stage, _: parsed.append(stage))
    assert not parsed, "what is there is taken over"
    assert contents(tmp_path / "set") == contents(tmp_path / "whole" / "set")


def test_other_data_are_encoded_alike_in_one_pass(
    prepare_criteo, criteo_file, criteo_lines, tmp_path
):
    """With the vocabularies of another dataset nothing is counted either."""
    prepare_criteo(criteo_file, tmp_path / "first")
    first = EncodedDataset.open(tmp_path / "first")
    packed = tmp_path / "later.gz"
    packed.write_bytes(gzip.compress("\n".join(criteo_lines[1400:]).encode()))
    options = {"vocabularies": Vocabularies.of_dataset(first), "split": SplitRule.parse("test")}
    report = prepare_criteo(packed, tmp_path / "later", first.schema, **options)
    later = EncodedDataset.open(tmp_path / "later")
    later.verify()
    assert later.fingerprint == first.fingerprint and report.num_rows == first.num_rows
    expected = [first.split(name).ids for name in ("validation", "test")]
    assert np.array_equal(later.split("test").ids, np.concatenate(expected))
    assert all(np.array_equal(later.codes(f"C{i}"), first.codes(f"C{i}")) for i in range(1, 27))


def test_one_request_is_encoded_by_the_encoders_of_serving(tmp_path):
    dataset, _ = prepare_mixed(tmp_path, mixed_lines(20))
    encoders = Vocabularies.of_dataset(dataset).encoders()
    assert isinstance(encoders, Encoders)
    columns = {"user": [12, None], "city": ["a", ""], "tags": [["x", 7], []]}
    columns |= {"item": [12.0, "012"], "days": ["1|2", None]}
    batch = batch_from_raw(dataset.schema, encoders, columns)
    assert batch.select(("user",)).values.tolist() == [key("12"), MISSING_KEY]
    assert batch.select(("tags",)).values.tolist() == [key("x"), key("7")]
    assert batch.select(("item",)).values.tolist() == [key("12"), key("012")]


def test_what_needs_rows_refuses_raw_ids(tmp_path):
    dataset, _ = prepare_mixed(tmp_path, mixed_lines(40))
    with pytest.raises(DataError, match=r"table `user` with raw ids, .*need one with rows"):
        dataset.access_counts("user")
    with pytest.raises(DataError, match="feature 'user' of table 'user', whose ids are raw"):
        count_dataset(dataset)
    only = count_dataset(dataset, features_of={"city": ("city",)})
    assert only.num_rows == {"city": 52}


@pytest.mark.parametrize("line", ["num_buckets = 3", "max_rows = 5", 'binning = "log"'])
def test_raw_ids_have_no_number_of_rows(line):
    name = line.split()[0]
    with pytest.raises(ConfigError, match=f"no `{name}` for the raw ids of `a`"):
        Schema.from_toml(f'label = "y"\n[categorical.a]\nencoding = "raw"\n{line}\n')


def test_changes_of_a_schema():
    schema = Schema.from_toml(
        'label = "y"\n[categorical.a]\nmax_rows = 9\n[categorical.b]\nencoding = "hash"\n'
        'num_buckets = 5\n[categorical.c]\nbinning = "log"\n[categorical.d]\n'
    )
    changed = schema.with_changes(raw=True, hash_buckets={"d": 7})
    assert [f.encoding for f in changed.categorical] == ["raw", "hash", "vocabulary", "hash"]
    assert Schema.from_toml(changed.to_toml()) == changed
    assert changed.with_changes(hash_buckets={"a": 3}).categorical[0].fixed_num_rows == 5


def test_a_value_that_is_always_missing_is_warned_of(tmp_path):
    lines = ["y,user,city,tags,item,days"] + [f"{i % 2},,c,a,{i},1" for i in range(50)]
    _, report = prepare_mixed(tmp_path, lines)
    assert report.warnings == (
        "`user`: 100.0% of its training ids are missing: check the column `user`",
    )


@pytest.mark.parametrize("multi_hot", [False, True])
def test_generated_raw_ids_are_those_of_the_numbers_in_a_log(tmp_path, multi_hot):
    options = {"max_table_rows": 40, "multi_hot": multi_hot}
    synthesize(SyntheticOptions(500, 3, **options), tmp_path / "rows")
    synthesize(SyntheticOptions(500, 3, raw=True, **options), tmp_path / "raw")
    rows, raw = (EncodedDataset.open(tmp_path / name) for name in ("rows", "raw"))
    raw.verify()
    assert set(raw.num_rows.values()) == {None} and raw.truth == rows.truth
    encoder = FeatureEncoder(raw.schema.categorical[0])
    keys = encoder.encode(range(40))[0]
    for batch, other in zip(
        Loader(raw.split("train"), 100), Loader(rows.split("train"), 100), strict=True
    ):
        assert np.array_equal(batch.values, keys[other.values - 2])
        assert batch.offsets.equal(other.offsets) and batch.dense.equal(other.dense)
