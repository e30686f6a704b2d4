"""Checkpoints written beside training.

A run that is killed between two of its own goes on from them, to the same bits.
"""

import json
import os
import shutil
import signal

import training_cases as cases
from launched_team import Team, wait_until

from pibroch.config import to_toml
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import files_below, make_config

COMMON = [
    "train.steps=42",
    "train.checkpoint_every=14",
    "train.keep=9",
    "train.evaluate_every=21",
    "train.full_checkpoint_every=2",
]
EXCHANGE = ["embedding.exchange=alltoall", "train.average=0.9", "embedding.dtype=bfloat16"]


def newest(run):
    result = CheckpointFolder(run / "recovery", 9).steps()
    return result[-1] if result else 0


def check_same(run, expected):
    files, right = (files_below(folder / "checkpoints") for folder in (run, expected))
    assert sorted(files) == sorted(right)
    for name in files:
        if name.endswith("manifest.json"):
            files[name], right[name] = (_without_interval(each[name]) for each in (files, right))
    assert [name for name in files if files[name] != right[name]] == []


def _without_interval(manifest):
    content = json.loads(manifest)
    del content["config"]["train"]["checkpoint_every_seconds"], content["sha256"]
    del content["config"]["train"]["cut_every_seconds"]
    del content["config"]["embedding"], content["config"]["data"]
    return content


def test_a_killed_run_goes_on_from_what_was_written_beside_it(worlds, data, tmp_path):
    config = make_config(data, *COMMON, *EXCHANGE, "train.checkpoint_every_seconds=0")
    expected = tmp_path / "expected"
    worlds(2).run(cases.train, config.model_dump(), str(expected))
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(config.model_dump()))
    often = ["--set", "train.checkpoint_every_seconds=0.02"]
    for _ in range(
        5
    ):  # on a busy machine the next checkpoint of its own may come before the signal
        shutil.rmtree(run, ignore_errors=True)
        with Team(recipe, "--run-dir", run, "--ranks", 2, *often) as team:
            wait_until(lambda: newest(run) > 14 or team.process.poll() is not None, 120)
            os.killpg(team.process.pid, signal.SIGKILL)
            team.end()
        left = newest(run)
        own = max(CheckpointFolder(run / "checkpoints", 9).steps())
        if left > own:
            break
    assert left > own >= 14
    with Team("--run-dir", run, "--resume", "--ranks", 2, *often) as team:
        assert team.end() == 0, team.output
    assert f"resumed from {run / 'recovery'}/step-{left:08d}" in team.output
    assert not (run / "recovery").exists()
    assert json.loads((run / "summary.json").read_text())["timed_checkpoints"] > 0
    check_same(run, expected)
