"""The arrays of torchrec.datasets.criteo."""

import os

import numpy as np
import pytest

from pibroch.data import EncodedDataset
from pibroch.data.npy import NpySource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_npy_schema
from pibroch.data.sources import Place
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError
from small_run import run_command

NUM_ROWS = 500


@pytest.fixture
def day(tmp_path):
    rng = np.random.default_rng(0)
    dense = np.log(rng.integers(0, 900, (NUM_ROWS, 13)) + 3).astype(np.float32)
    dense[3, 5] = np.nan
    arrays = {
        "dense": dense,
        "sparse": rng.integers(-(2**31), 2**31, (40, 26))[rng.integers(0, 40, NUM_ROWS)].astype(
            np.int32
        ),
        "labels": rng.integers(0, 2, (NUM_ROWS, 1)).astype(np.int32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"day_0_{name}.npy", array)
    return tmp_path / "day_0_dense.npy", arrays


def test_a_day_to_a_dataset(day, tmp_path):
    path, arrays = day
    schema = criteo_npy_schema()
    options = PrepareOptions(split=SplitRule.parse("none"), piece_bytes=1 << 15)
    prepare([NpySource(path)], schema, tmp_path / "out", options)
    split = EncodedDataset.open(tmp_path / "out").split("train")
    assert np.array_equal(split.dense, np.nan_to_num(arrays["dense"]))
    assert np.array_equal(split.labels, arrays["labels"][:, 0])
    ids = np.array(split.ids)
    for column in range(26):
        pairs = set(zip(arrays["sparse"][:, column].tolist(), ids[:, column].tolist(), strict=True))
        assert len(pairs) == len({value for value, _ in pairs}) == len({row for _, row in pairs})
        assert min(row for _, row in pairs) > 1


def test_the_command_takes_days(day, tmp_path):
    path, _ = day
    for name in ("dense", "sparse", "labels"):
        os.link(tmp_path / f"day_0_{name}.npy", tmp_path / f"day_1_{name}.npy")
    later = path.with_name("day_1_dense.npy")
    ended = run_command("data", "prepare", "criteo-npy", path, later, "--out", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert f"{2 * NUM_ROWS:,} samples" in ended.stdout


def test_pieces_go_on_in_the_middle(day):
    source = NpySource(day[0])
    pieces = list(source.pieces(Place(), 1 << 14))
    assert len(pieces) > 5
    assert [piece.text for piece in source.pieces(pieces[3].start, 1 << 14)] == [
        piece.text for piece in pieces[3:]
    ]
    assert pieces[-1].end == Place(NUM_ROWS, NUM_ROWS)


def test_labels_may_be_absent_where_none_are_read(day):
    path, _ = day
    path.with_name("day_0_labels.npy").unlink()
    assert NpySource(path, has_labels=False).columns[0] == "I1"
    with pytest.raises(DataError, match=r"no file .*day_0_labels"):
        NpySource(path)


@pytest.mark.parametrize(
    ("name", "array", "got"),
    [
        ("sparse", np.zeros((NUM_ROWS, 25), np.int32), "int32 [500, 25]"),
        ("sparse", np.zeros((NUM_ROWS, 26), np.float32), "float32 [500, 26]"),
        ("sparse", np.zeros((NUM_ROWS - 1, 26), np.int32), "499 rows"),
        ("labels", np.zeros((NUM_ROWS, 2), np.int32), "int32 [500, 2]"),
        ("dense", np.zeros((NUM_ROWS, 13), np.float64), "float64 [500, 13]"),
        ("dense", np.zeros((0, 13), np.float32), "500 rows"),
    ],
)
def test_other_arrays_are_refused(day, name, array, got):
    path, _ = day
    np.save(path.with_name(f"day_0_{name}.npy"), array)
    with pytest.raises(DataError) as failure:
        NpySource(path)
    assert got in failure.value.got


def with_header(text):
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(4096)


HEADERS = [
    "{'descr': '<i4', 'fortran_order': False, 'shape': (%s, 1), }" % 10**30,
    "{'descr': '<i4', 'fortran_order': False, 'shape': (%s, 1), }" % -1,
    "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (8, 1), }",
    "{'descr': '<i4', 'fortran_order': 5, 'shape': (8, 1), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': ({}, 1), }",
    "{'descr': {}, 'fortran_order': False, 'shape': (8, 1), }",
    "{{}: 1, 'descr': '<i4', 'fortran_order': False, 'shape': (8, 1)}",
    "[" * 9000,
    "-" * 9000 + "1",
    "{'descr': '<i4'",
    "()",
]
"""What a stranger may write where NumPy evaluates a header."""


def test_pickles_and_cut_files_are_refused(day):
    path, _ = day
    labels = path.with_name("day_0_labels.npy")
    whole = labels.read_bytes()
    for content in (whole[:-1], whole[:40], b"", b"no array", *map(with_header, HEADERS)):
        labels.write_bytes(content)
        with pytest.raises(DataError, match="day_0_labels"):
            NpySource(path)
    np.save(labels, np.array([{"a": 1}] * NUM_ROWS, object), allow_pickle=True)
    with pytest.raises(DataError, match="without pickles"):
        NpySource(path)
    with pytest.raises(DataError, match="a file of dense values"):
        NpySource(labels)
