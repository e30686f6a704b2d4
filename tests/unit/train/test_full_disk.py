"""A run whose disk is full for a while goes on without logs; checkpoints stay whole."""

import json
import logging
import shutil
import subprocess
from contextlib import suppress

import pytest

from pibroch.errors import StorageError
from pibroch.observability.records import FanOut
from pibroch.observability.sinks import TensorBoard
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory
from published_versions import check_same
from small_run import files_below, make_config, make_dataset

SETTINGS = ["train.epochs=1", "train.evaluate_every=1000", "train.checkpoint_every_seconds=0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Filling:
    """Fills the disk after one step, and makes room after another."""

    def __init__(self, disk, full_at, free_at):
        self._filler = disk / "filler"
        self._full_at = full_at
        self._free_at = free_at

    def training(self, record):
        if record.step == self._full_at:
            with suppress(OSError), self._filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
        if record.step == self._free_at:
            self._filler.unlink()

    def evaluation(self, record):
        pass

    def window(self, record):
        pass

    def close(self):
        pass


def train(config, folder, *sinks, traces=False):
    run = RunDirectory(folder)
    if not run.exists():
        run.create(config)
    return run_training(
        config, open_dataset(config.data), run, lambda _: FanOut(sinks), traces=traces
    )


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # TensorBoard's own thread ends
def test_a_run_goes_on_without_its_logs_and_catches_up(data, disk, tmp_path, caplog):
    config = make_config(data, *SETTINGS, "train.checkpoint_every=1000", "train.steps=20")
    train(config, tmp_path / "undisturbed")
    with caplog.at_level(logging.INFO, "pibroch"):
        sinks = [TensorBoard(disk / "run" / "tensorboard"), Filling(disk, 4, 18)]
        train(config, disk / "run", *sinks, traces=True)
    records = [
        json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [r["step"] for r in records if r["kind"] == "training"] == list(range(1, 21))
    messages = [record.getMessage() for record in caplog.records]
    assert sum("its lines wait for room" in message for message in messages) == 1
    assert sum("is written again" in message for message in messages) == 1
    checkpoints = [folder / "checkpoints" for folder in (disk / "run", tmp_path / "undisturbed")]
    assert files_below(checkpoints[0]) == files_below(checkpoints[1])


def test_a_checkpoint_that_finds_no_room_leaves_the_last_one(data, disk, tmp_path):
    config = make_config(data, *SETTINGS, "train.checkpoint_every=5", "train.steps=12")
    train(config, tmp_path / "undisturbed")
    with pytest.raises(StorageError, match=r"No space left.*checkpoint"):
        train(config, disk / "run", Filling(disk, 7, 10_000))
    folder = disk / "run" / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-00000005"]
    (disk / "filler").unlink()
    train(config, disk / "run")
    expected = files_below(tmp_path / "undisturbed" / "checkpoints")
    assert files_below(folder) == expected


def test_a_version_that_finds_no_room_is_left_out_and_its_rows_are_in_the_next_one(
    data, disk, tmp_path, caplog
):
    config = make_config(
        data,
        *SETTINGS,
        "train.steps=20",
        "train.checkpoint_every=1",
        "train.keep=99",
        f"train.publish_to={disk / 'models'}",
        "train.publish_every_seconds=1e-9",
    )
    train(config, tmp_path / "run", Filling(disk, 6, 12))
    assert "no new version at step" in caplog.text and "No space left" in caplog.text
    models = (disk / "models").rename(disk / "kept")
    shutil.copytree(models, tmp_path / "models")
    assert not list(models.glob(".*"))
    steps = check_same(tmp_path / "models", tmp_path / "run" / "checkpoints")
    assert steps[0] < 7 and steps[-1] == 20
    # one that was begun while the disk was full may be written after it was
    assert len({8, 9, 10, 11} & set(steps)) <= 1
