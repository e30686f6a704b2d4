"""Files of libsvm and libffm."""

import gzip
import time

import numpy as np
import pytest

from pibroch.data import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import Place
from pibroch.data.sparse_text import SparseTextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import ConfigError, DataError

LIBSVM = """\
# made by hand
-1 1:0.5 101:1 205:1 207:1
+1 qid:7 2:3 1:2.5e0 0103:1.0 # a comment

-1 101:1 1:-1 207:0 208:1
"""
OF_LIBSVM = """
label = "label"
[target.label]
values = { "-1" = 0, "+1" = 1 }
[dense.price]
column = "1"
transform = "identity"
[dense.age]
column = "2"
transform = "identity"
[categorical.city]
column = "100-199"
min_count = 1
[categorical.tags]
column = "200-299"
multi_hot = true
min_count = 1
"""
LIBFFM = "1 0:3:0.25 1:17:1 2:40:1 2:41:1\n0 0:3:4 1:18:1\n0 1:17:1 2:40:1\n"
OF_LIBFFM = """
label = "label"
[dense.number]
column = "0"
transform = "identity"
[categorical.user]
column = "1"
min_count = 1
[categorical.words]
column = "2"
multi_hot = true
min_count = 1
[categorical.all]
column = "1-2"
multi_hot = true
encoding = "hash"
num_buckets = 50
"""
ALL = SplitRule.parse("none")


def written(tmp_path, text):
    path = tmp_path / "train.txt"
    path.write_text(text)
    return path


def prepared(path, schema, has_fields, **options):
    schema = Schema.from_toml(schema)
    source = SparseTextSource(path, schema, has_fields)
    out = path.with_name("out")
    report = prepare([source], schema, out, PrepareOptions(split=ALL, **options))
    return EncodedDataset.open(out), report


def test_libsvm_to_a_dataset(tmp_path):
    dataset, report = prepared(written(tmp_path, LIBSVM), OF_LIBSVM, has_fields=False)
    split = dataset.split("train")
    assert report.num_bad == 0
    assert np.array(split.labels).tolist() == [0, 1, 0]
    assert np.array(split.dense).tolist() == [[0.5, 0], [2.5, 3], [-1, 0]]
    assert dataset.num_rows == {"city": 4, "tags": 5}
    cities = np.array(split.ids)[:, 0].tolist()
    assert cities[0] == cities[2] != cities[1]
    assert split.bags["tags"].offsets.tolist() == [0, 2, 2, 3], "207:0 is none"


def test_values_mean_the_same_when_they_are_served(tmp_path):
    dataset, _ = prepared(written(tmp_path, LIBSVM), OF_LIBSVM, has_fields=False)
    row = {"1": [2.5], "2": [3], "100-199": [103], "200-299": [[]]}
    batch = batch_from_raw(dataset.schema, dataset.encoders, row)
    split = dataset.split("train")
    assert batch.dense.tolist() == np.array(split.dense)[1:2].tolist()
    assert batch.select(("city",)).values.tolist() == np.array(split.ids)[1].tolist()


def test_libffm_to_a_dataset(tmp_path):
    path = tmp_path / "train.ffm.gz"
    path.write_bytes(gzip.compress(LIBFFM.encode()))
    dataset, _ = prepared(path, OF_LIBFFM, has_fields=True)
    split = dataset.split("train")
    assert np.array(split.labels).tolist() == [1, 0, 0]
    assert np.array(split.dense).tolist() == [[0.25], [4], [0]]
    users = np.array(split.ids)[:, 0].tolist()
    assert users[0] == users[2] != users[1]
    assert split.bags["words"].offsets.tolist() == [0, 2, 2, 3]
    assert split.bags["all"].offsets.tolist() == [0, 3, 4, 6]


def test_groups_are_those_of_qid(tmp_path):
    schema = 'label = "label"\ngroup = "qid"\n[categorical.i]\ncolumn = "indices"\nmulti_hot = true'
    text = "1 qid:3 1:1\n0 qid:3 2:1\n1 qid:4 1:1\n"
    dataset, _ = prepared(written(tmp_path, text), schema, has_fields=False)
    groups = np.array(dataset.split("train").groups).tolist()
    assert groups[0] == groups[1] != groups[2]


def test_a_line_takes_time_by_its_length(tmp_path):
    path = written(tmp_path, "1 1:1 2:1 " + "207:1 " * 150_000)
    started = time.process_time()
    source = SparseTextSource(path, Schema.from_toml(OF_LIBSVM), has_fields=False)
    (piece,) = source.pieces(Place(), 1 << 20)
    assert piece.text.count(b"207") == 150_000
    assert time.process_time() - started < 4, "by the square of its length it took 14 seconds"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1 1:0.5 101", "`101`, INDEX:VALUE is needed"),
        ("1 1:2:3", "`1:2:3`, INDEX:VALUE is needed"),
        (f"1 {'9' * 5000}:1", f"`{'9' * 37}...`, 18 digits are allowed"),
        ("1 x:1", "`x:1`, INDEX:VALUE is needed"),
        ("1 -3:1", "`-3:1`, INDEX:VALUE is needed"),
        ("1 1:nan", "`1:nan`, a finite number is needed as its value"),
        ("1 1:1_0", "`1:1_0`, a finite number is needed as its value"),
        ("1 101:0.5", "`101:0.5` for a category, the value 1 is needed"),
        ("1 101:1 102:1", "`102:1`, a second index in a column of one"),
        ("1 1:2 1:3", "`1:3`, which has a second value for a number"),
        ("1:2 101:1", "`1:2` first, a label is needed"),
        ("2 101:1", "`2` as label"),
        ("+1,-1 101:1", "`+1,-1` as label"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, reason):
    path = written(tmp_path, f"+1 101:1\n\n{line}\n-1 102:1\n")
    with pytest.raises(DataError) as failure:
        prepared(path, OF_LIBSVM, has_fields=False)
    assert f"1 malformed of 3 records: {path} line 3: {reason}" in failure.value.got
    dataset, report = prepared(path, OF_LIBSVM, has_fields=False, max_bad_fraction=0.5)
    assert report.num_bad == 1
    assert dataset.samples["train"] == 2


def test_a_line_of_the_other_format_is_malformed(tmp_path):
    with pytest.raises(DataError, match=r"`1:0\.5`, FIELD:INDEX:VALUE is needed"):
        prepared(written(tmp_path, LIBSVM), OF_LIBFFM, has_fields=True)


@pytest.mark.parametrize(
    ("schema", "need"),
    [
        ('label = "clicked"\n[categorical.a]\ncolumn = "1"', "`label`, `qid`, `indices`"),
        (
            'label = "label"\n[categorical.a]\ncolumn = "1"\n[dense.a]\ncolumn = "1"',
            "one of them",
        ),
    ],
)
def test_columns_that_there_are_not(tmp_path, schema, need):
    with pytest.raises(ConfigError) as failure:
        SparseTextSource(written(tmp_path, LIBSVM), Schema.from_toml(schema), False)
    assert need in failure.value.need


def test_pieces_of_any_size_are_the_same_lines(tmp_path):
    path = written(tmp_path, LIBSVM * 20)
    source = SparseTextSource(path, Schema.from_toml(OF_LIBSVM), False)
    (whole,) = source.pieces(Place(), 1 << 20)
    small = list(source.pieces(Place(), 100))
    assert len(small) > 5
    assert b"".join(piece.text for piece in small) == whole.text
    assert small[-1].end == whole.end
    rest = b"".join(piece.text for piece in source.pieces(small[2].start, 100))
    assert whole.text.endswith(rest)


def test_lines_without_labels(tmp_path):
    path = written(tmp_path, "1:2 101:1\n0 101:1\n")
    source = SparseTextSource(path, Schema.from_toml(OF_LIBSVM), False, has_labels=False)
    (piece,) = source.pieces(Place(), 1000)
    assert not piece.bad
    assert piece.text == b"\t2\t0\t101\t\n0\t0\t0\t101\t\n"
