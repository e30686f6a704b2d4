"""Kill -9 at a random moment and resume: the same final bits, for every sparse optimizer."""

import random
import shutil
import signal
import time

import pytest

from pibroch.config import to_toml
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import files_below, make_config, run_command, start_command, train_here

CASES = {
    "sgd": [
        "embedding.optimizer={name='sgd', lr=0.5}",
        "optimizer={name='sgd', lr=0.1, momentum=0.9}",
    ],
    "adagrad": [
        "embedding.optimizer={name='adagrad', lr=0.1}",
        "optimizer={name='adagrad', lr=0.05}",
        "train.full_checkpoint_every=4",
    ],
    "rowwise_adagrad": [
        "embedding.optimizer={name='rowwise_adagrad', lr=0.1, weight_decay=1e-4}",
        "optimizer={name='adamw', lr=0.01}",
        "schedule={name='cosine', warmup_steps=9, plateau_factor=0.9}",
    ],
    "adam": [
        "train.average=0.9",
        "model.embedding_dropout=0.1",
        "train.bf16=true",
        "train.clip_norm=1.0",
        "train.full_checkpoint_every=2",
    ],
    "rowwise_adam": [
        "embedding.optimizer={name='rowwise_adam', lr=0.01}",
        "train.threads=2",
        "model.name=dcnv2",
    ],
}
TIMEOUT_SECONDS = 120


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(data, tmp_path, name):
    config = make_config(data, "train.epochs=3", "train.evaluate_every=15", *CASES[name])
    assert config.embedding.optimizer.name == name
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config.model_dump()))
    undisturbed, expected = train_here(config, tmp_path / "undisturbed")
    assert expected.summary.steps == 63

    folder = tmp_path / "killed"
    step = kill_at(random.SystemRandom().randrange(5, 40), recipe, folder)
    message = f"killed at step {step} or just after"
    assert CheckpointFolder(folder / "checkpoints", 2).steps()[-1:] != [63], message
    resumed = run_command("train", recipe, "--run-dir", folder, "--resume")
    assert resumed.returncode == 0, resumed.stderr

    assert files_below(folder / "checkpoints") == files_below(undisturbed.checkpoints_path), message
    assert f"test AUC {expected.summary.auc:.4f}" in resumed.stdout, message
    assert curve(folder) == curve(undisturbed.path), message


def kill_at(step, recipe, folder):
    """Start a run and kill it with signal 9 once it reports ``step``.

    Returns the last step that it reported.
    """
    for _ in range(3):  # on a busy machine a run may end before it is killed
        shutil.rmtree(folder, ignore_errors=True)
        with start_command("train", recipe, "--run-dir", folder) as process:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while (reported := last_step(folder)) < step and process.poll() is None:
                assert time.monotonic() < deadline, f"no step {step} in {TIMEOUT_SECONDS} s"
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            ended = process.end()
        if ended.returncode == -signal.SIGKILL:
            return reported
        assert ended.returncode == 0, ended.stderr
    raise AssertionError("the run always ended before it could be killed")


def last_step(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "training"') if path.exists() else 0


def curve(folder):
    """What was measured, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if '"evaluation"' in line] + [
        line.split('"samples_per_second"')[0] for line in lines if '"training"' in line
    ]
