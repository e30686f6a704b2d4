"""Checkpoints written beside training, one after each step.

What is in them, and what happens when the disk refuses.
"""

import json
import logging

import numpy as np
import pytest

from pibroch.collectives import task_thread
from pibroch.errors import CheckpointError
from pibroch.observability.records import FanOut
from pibroch.serve.predictor import Predictor
from pibroch.state.checkpoint import LONGEST_CHAIN
from pibroch.state.dense import ROW_INDICES
from pibroch.state.manifest import read_manifest
from pibroch.state.tensor_file import load_tensors
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory
from small_run import files_below, make_config, train_here

EVERY_STEP = "train.checkpoint_every_seconds=1e-9"
LONG = [
    "train.steps=40",
    "train.checkpoint_every=1000",
    "train.evaluate_every=1000",
    "train.average=0.9",
]


class Stopped(Exception):
    """What ends a run at a step."""


class Until(FanOut):
    """Waits at each step until the one before is on the disk, and ends the run at some step."""

    def __init__(self, run, last, before=lambda step: None):
        super().__init__([])
        self._run = run
        self._last = last
        self._before = before

    def training(self, record):
        for thread in list(task_thread._RUNNING):
            if thread.thread.name == "pibroch-timed":
                thread.flush()
        self._before(record.step)
        if record.step == self._last:
            raise Stopped


def train_until(config, run, last, **more):
    if not run.exists():
        run.create(config)
    with pytest.raises(Stopped):
        run_training(
            config, open_dataset(config.data), run, lambda total_steps: Until(run, last, **more)
        )


def saved(run):
    files = files_below(run.checkpoints_path)
    for name in [name for name in files if name.endswith("manifest.json")]:
        files[name] = json.loads(files[name])
        del files[name]["config"]["train"], files[name]["sha256"]
    return files


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    run, _ = train_here(
        make_config(data, *LONG, "train.checkpoint_every_seconds=0"), tmp_path_factory.mktemp("run")
    )
    assert not run.recovery_path.exists()
    return saved(run)


def test_a_long_chain_becomes_short_and_goes_on_to_the_same_bits(data, tmp_path, expected):
    config = make_config(data, *LONG, EVERY_STEP)
    run = RunDirectory(tmp_path / "run")
    for last in (12, 24):  # twice: the second chain begins in the first
        train_until(config, run, last)
        names = sorted(path.name for path in run.recovery_path.glob("step-*"))
        assert names == [f"step-{last - 2:08d}", f"step-{last - 1:08d}"]
        parts = [
            len(table.parts)
            for table in read_manifest(run.recovery_path / names[-1], to_go_on=True).tables.values()
        ]
        assert 0 < max(parts) <= LONGEST_CHAIN + 1 < last - 1, "a delta a step, and some became one"
    with pytest.raises(
        CheckpointError, match="lacks all rows that were not updated before step 23"
    ):
        Predictor.open(run.recovery_path / names[-1])
    _, result = train_here(config, run.path)
    assert saved(run) == expected
    assert not run.recovery_path.exists()
    assert result.summary.timed_checkpoints > 0 and result.summary.timed_checkpoint_seconds > 0


def test_a_damaged_one_is_set_aside_for_the_one_before(data, tmp_path, expected, caplog):
    config = make_config(data, *LONG, EVERY_STEP)
    run = RunDirectory(tmp_path / "run")
    train_until(config, run, 12)
    (run.recovery_path / "step-00000011" / "dense.safetensors").write_bytes(b"other")
    with caplog.at_level(logging.INFO):
        train_here(config, run.path)
    assert "step 11 is damaged" in caplog.text and "the run goes on from step 10" in caplog.text
    assert saved(run) == expected


def test_training_goes_on_when_the_disk_refuses_and_the_next_one_has_all_rows(
    data, tmp_path, expected, caplog
):
    config = make_config(data, *LONG, EVERY_STEP)
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    run.recovery_path.write_text("no folder")

    def make_room(step):
        if step == 12:
            run.recovery_path.unlink()
            run.recovery_path.mkdir()

    train_until(config, run, 18, before=make_room)
    assert "no checkpoint beside training at step" in caplog.text
    assert (run.recovery_path / "step-00000017").is_dir()
    train_here(config, run.path)
    assert saved(run) == expected


def test_the_state_of_row_indices_is_in_them(data, shuffled_rows, tmp_path):
    rows = "embedding.rows=shuffled_rows:Shuffled"
    config = make_config(data, "train.steps=6", "train.checkpoint_every=1000", EVERY_STEP, rows)
    run = RunDirectory(tmp_path / "run")
    train_until(config, run, 4)
    states = [index.row_of for index in shuffled_rows]
    saved = load_tensors(run.recovery_path / "step-00000003", ROW_INDICES)
    assert len(saved) == len(states)
    shuffled_rows.clear()
    train_here(config, run.path)
    np.testing.assert_equal([index.row_of for index in shuffled_rows], states)
