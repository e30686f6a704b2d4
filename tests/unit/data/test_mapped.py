"""Datasets that change while they are read."""

import os
import shutil
import subprocess
import sys

import pytest

from pibroch.data import mapped
from pibroch.data.dataset import EncodedDataset
from pibroch.data.loader import Loader
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import DataError
from pibroch.processors.processor import Processor
from pibroch.processors.source import Source


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "made"
    synthesize(SyntheticOptions(num_samples=2000, max_table_rows=40, multi_hot=True), folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch):
    monkeypatch.setattr(mapped, "LOOK_EVERY_S", 0.0)


def replaced(path):
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").replace(path)


CHANGES = {
    "replaced by another file": replaced,
    "cut or extended": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "written to": lambda path: os.utime(path, ns=(1, 1)),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["labels.u8", "ids.i32", "C1.offsets.i64"])
def test_a_file_that_changes_is_named_before_it_is_read_again(folder, name, how):
    path = folder / "train" / name
    if not path.exists():
        path = next((folder / "train").glob("*.offsets.i64"))
    loader = Loader(EncodedDataset.open(folder).split("train"), 100, shuffle=True)
    batches = iter(loader)
    next(batches)
    CHANGES[how](path)
    with pytest.raises(
        DataError, match=rf"{path.name}, which was {how}.*need data that stay.*do: .*--resume"
    ):
        next(batches)


@pytest.mark.parametrize("how", CHANGES)
def test_so_is_one_that_changes_between_opening_and_mapping(folder, how):
    dataset = EncodedDataset.open(folder)
    CHANGES[how](folder / "train" / "ids.i32")
    with pytest.raises(DataError, match=rf"ids\.i32, which was {how}"):
        dataset.split("train")


def test_a_dataset_prepared_anew_under_a_reader_is_not_mixed_with_the_old_one(made, folder):
    batches = iter(Loader(EncodedDataset.open(folder).split("train"), 100))
    next(batches)
    synthesize(
        SyntheticOptions(num_samples=2000, max_table_rows=40, multi_hot=True, seed=5),
        folder,
        overwrite=True,
    )
    with pytest.raises(DataError, match="replaced by another file"):
        next(batches)


def test_a_cut_file_does_not_kill_the_process(folder):
    program = f"""
import os
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import DataError
batches = iter(Loader(EncodedDataset.open({str(folder)!r}).split("train"), 100))
next(batches)
os.truncate({str(folder / "train" / "dense.f32")!r}, 0)
try:
    next(batches)
except DataError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and "dense.f32, which was cut" in ended.stdout, ended


def test_files_are_looked_at_every_now_and_then(folder, monkeypatch):
    """At once when a dataset is slow to read, for a bounded share of the time when it is quick."""
    monkeypatch.setattr(mapped, "LOOK_EVERY_S", 1000.0)
    batches = iter(Loader(EncodedDataset.open(folder).split("train"), 100))
    next(batches)
    num_looks = []
    monkeypatch.setattr(mapped.os, "stat", num_looks.append)
    for _ in range(5):
        next(batches)
    assert not num_looks


def test_a_processor_reads_a_dataset_that_came_back(folder, made):
    dataset = EncodedDataset.open(folder)
    source = Source.of(dataset, Loader(dataset.split("train"), 100))
    processor = Processor()
    first = processor.batch(source, Loader(dataset.split("train"), 100).position)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="removed"):
        processor.batch(source, Loader(EncodedDataset.open(made).split("train"), 100).position)
    shutil.copytree(made, folder)
    again = processor.batch(source, Loader(EncodedDataset.open(made).split("train"), 100).position)
    assert (again["values"] == first["values"]).all()
