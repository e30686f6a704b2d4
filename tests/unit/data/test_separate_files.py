"""Files of their own for training, validation and test."""

from itertools import pairwise

import numpy as np
import pytest

from pibroch.data import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import DataError
from small_run import run_command

SCHEMA = """
label = "y"
[dense.number]
transform = "identity"
[categorical.item]
"""
SIZES = {"a": 40, "b": 23, "valid": 11, "test": 7}


@pytest.fixture
def files(tmp_path):
    first = 0
    for name, size in SIZES.items():
        lines = [f"{i % 2},{i},i{i % 5}{name[0]}" for i in range(first, first + size)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["y,number,item", *lines]) + "\n")
        first += size
    return tmp_path


def opened(files, encoding, numbers, **options):
    schema = Schema.from_toml(SCHEMA + encoding)
    sources = [TextSource(files / f"{name}.csv", ",", True) for name in SIZES]
    rule = SplitRule("files", files=numbers)
    prepare(sources, schema, files / "out", PrepareOptions(rule, piece_bytes=100, **options))
    return EncodedDataset.open(files / "out")


@pytest.mark.parametrize("encoding", ["min_count = 2", 'encoding = "hash"\nnum_buckets = 9'])
@pytest.mark.parametrize("numbers", [(2, 1, 1), (3, 0, 1), (1, 3, 0), (4, 0, 0)])
def test_samples_are_where_their_file_is(files, encoding, numbers):
    dataset = opened(files, encoding, numbers)
    borders = np.cumsum([0, *numbers])
    sizes = [sum([*SIZES.values()][first:after]) for first, after in pairwise(borders)]
    assert list(dataset.samples.values()) == sizes
    first = 0
    for name, size in zip(dataset.samples, sizes, strict=True):
        assert dataset.split(name).dense[:, 0].tolist() == list(range(first, first + size))
        first += size


def test_training_files_alone_are_counted(files):
    dataset = opened(files, "min_count = 1", (2, 1, 1))
    assert dataset.num_rows["item"] == 2 + 10  # of two files, five values each
    assert (dataset.split("test").ids == 0).all()


def test_without_training_files_there_is_nothing_to_count(files):
    with pytest.raises(DataError, match="no training samples"):
        opened(files, "", (0, 2, 2))
    vocabularies = Vocabularies.of_dataset(opened(files, "min_count = 1", (4, 0, 0)))
    dataset = opened(files, "min_count = 1", (0, 2, 2), vocabularies=vocabularies, overwrite=True)
    assert dataset.samples == {"train": 0, "validation": 63, "test": 18}


def test_the_command_takes_them(files):
    (files / "schema.toml").write_text(SCHEMA)
    names = [files / f"{name}.csv" for name in SIZES]
    arguments = ["data", "prepare", "csv", *names[:2], "--validation", names[2], "--test", names[3]]
    arguments += ["--schema", files / "schema.toml", "--out", files / "out"]
    run_command(*arguments)
    assert EncodedDataset.open(files / "out").samples == {"train": 63, "validation": 11, "test": 7}
    refused = run_command(*arguments, "--split", "time", "--overwrite")
    assert refused.returncode == 2 and "--split with --validation or --test" in refused.stderr
