"""`pibroch train` by towers: killed and resumed, and on other numbers of ranks."""

import os
import shutil
import signal

import pytest
import training_cases as cases
from launched_team import Team

from pibroch.config import to_toml
from pibroch.data import EncodedDataset
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import files_below, make_config

TOWERS = [
    "model.name=tower_dlrm",
    "model.towers={count=4, width=2, combined=1}",
    "model.batch_norm=false",
    "train.keep=99",
    "train.clip_norm=0.5",
    "train.average=0.9",
    "train.epochs=1",
]
HOSTS = ["embedding.exchange={name='towers', ranks_per_host=1, placement='table_wise_pooled'}"]


def train(world, config, folder):
    return world.run(cases.train, config.model_dump(), str(folder))


def test_real_ranks_killed_and_resumed_end_with_the_files_of_a_run_that_was_not(
    data, worlds, tmp_path
):
    config = make_config(data, *TOWERS, *HOSTS)
    recipe = tmp_path / "towers.toml"
    folder = tmp_path / "killed"
    recipe.write_text(to_toml(config.model_dump()))
    train(worlds(2), config, tmp_path / "expected")
    with Team(recipe, "--run-dir", folder, "--ranks", 2) as team:
        team.wait_for_step(folder, 9)
        os.killpg(team.process.pid, signal.SIGKILL)
        team.end()
    saved_steps = CheckpointFolder(folder / "checkpoints", 99).steps()
    assert 7 in saved_steps and 21 not in saved_steps
    with Team("--run-dir", folder, "--resume", "--ranks", 2) as team:
        assert team.end() == 0, team.output
    assert files_below(folder / "checkpoints") == files_below(tmp_path / "expected" / "checkpoints")


def test_a_checkpoint_of_four_ranks_evaluates_and_goes_on_at_any_number(data, worlds, tmp_path):
    """Towers of one rank, of two, and of two towers a rank; the same figures as under alltoall."""
    short = make_config(data, *TOWERS, *HOSTS, "train.steps=10")
    (first, *_) = train(worlds(4), short, tmp_path / "four")
    other = make_config(data, *TOWERS, "train.steps=10", "embedding.exchange=alltoall")
    expected = train(worlds(4), other, tmp_path / "alltoall")[0]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert first["summary"].auc == pytest.approx(expected["summary"].auc, abs=1e-6)
    alone = evaluate_checkpoint(tmp_path / "four", EncodedDataset.open(data), "test")
    assert alone.metrics.auc == pytest.approx(first["summary"].auc, abs=1e-6)
    long = make_config(data, *TOWERS, *HOSTS, "train.steps=15")
    ends = []
    for size in (1, 2, 3):
        shutil.copytree(tmp_path / "four", tmp_path / str(size), symlinks=True)
        (tmp_path / str(size) / "summary.json").unlink()  # so that the end is evaluated again
        again = train(worlds(size), short, tmp_path / str(size))[0]
        assert again["summary"].auc == pytest.approx(first["summary"].auc, abs=1e-6)
        ends.append(train(worlds(size), long, tmp_path / str(size))[0])
        assert ends[-1]["summary"].steps == 15
        assert ends[-1]["losses"] == pytest.approx(ends[0]["losses"], rel=1e-5)
        assert ends[-1]["summary"].auc == pytest.approx(ends[0]["summary"].auc, abs=1e-6)


def test_a_model_without_towers_trains_as_under_alltoall(data, worlds, tmp_path):
    results = {}
    for exchange in ("{name='towers', ranks_per_host=1}", "alltoall"):
        config = make_config(data, "train.steps=6", f"embedding.exchange={exchange}")
        results[exchange] = train(worlds(2), config, tmp_path / exchange[:4])[0]
    own, other = results.values()
    assert own["losses"] == other["losses"] and own["summary"].auc == other["summary"].auc
    assert own["summary"].exchange == "towers"
