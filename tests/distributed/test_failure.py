"""A rank fails: all others end within seconds, and the run goes on to the same bits.

They name the rank, its step and its reason.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import training_cases as cases
from launched_team import Team, wait_until

from pibroch.config import to_toml
from pibroch.ports import free_port
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import files_below, make_config

SETTINGS = [
    "train.epochs=3",
    "train.evaluate_every=15",
    "train.average=0.9",
    "train.full_checkpoint_every=3",
]
ENDS_S = 30.0


def kill(team, run, rank, step):
    """Kill a rank once ``step`` is reported, and hold what all others say to the promise."""
    pids = team.wait_for_step(run, step)
    assert sorted(pids) == [0, 1, 2, 3]
    reported = len((run / "metrics.jsonl").read_text().splitlines())
    os.kill(pids[rank], signal.SIGKILL)
    start = time.monotonic()
    assert team.end() == 128 + signal.SIGKILL
    assert time.monotonic() - start < ENDS_S
    wait_until(team.is_gone, ENDS_S)
    logs = {
        other: (run / "ranks" / f"rank-{other}.log").read_text()
        for other in (1, 2, 3)
        if other != rank
    }
    if rank != 0:
        logs[0] = team.output
    failures = [
        re.findall(rf"rank {rank} failed in step (\d+): its process ended", text)[-1:]
        for text in logs.values()
    ]
    assert len(failures) == 3 and all(failures), (team.output, logs)
    named = {int(result[0]) for result in failures}
    assert max(named) - min(named) <= (rank == 0) and step <= min(named), (named, reported)
    assert f"rank {rank} ended with signal SIGKILL" in team.output


def test_killed_ranks_are_named_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    worlds, data, tmp_path
):
    config = make_config(data, *SETTINGS)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config.model_dump()))
    run = tmp_path / "killed"
    arguments = [
        "--run-dir",
        run,
        "--ranks",
        4,
        "--resume",
    ]  # --resume without a checkpoint starts anew
    chance = random.SystemRandom()
    victim = chance.randrange(1, 4)
    first = chance.randrange(2, 25)
    second = chance.randrange(26, 40)
    with Team(recipe, *arguments) as team:
        kill(team, run, victim, first)
    with Team(*arguments) as team:
        kill(team, run, 0, second)
    for folder in (run, tmp_path / "undisturbed"):
        worlds(4).run(cases.train, config.model_dump(), str(folder))
    message = f"rank {victim} killed at step {first} or just after, rank 0 at step {second}"
    expected = files_below(tmp_path / "undisturbed" / "checkpoints")
    assert files_below(run / "checkpoints") == expected, message
    assert CheckpointFolder(run / "checkpoints", 2).steps()[-1] == 63


@contextmanager
def three_ranks(program):
    """Processes that run a file beside this one as the ranks of a run."""
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, Path(__file__).with_name(program)]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}, **pipes)
            )
            for rank in range(3)
        ]
        try:
            yield ranks
        finally:
            for process in ranks:
                process.kill()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_rank_that_waits_for_a_living_one_gives_up():
    with three_ranks("stuck_rank.py") as ranks:
        assert ranks[0].stdout.readline() == "waits\n"
        start = time.monotonic()
        go_on(ranks[1])
        for rank in (0, 2):
            errors = ranks[rank].communicate(timeout=ENDS_S)[1]
            assert (
                ranks[rank].returncode == 1
                and "rank 1 failed in step 3: its process ended" in errors
            ), errors
        assert time.monotonic() - start < ENDS_S


def test_a_stopped_rank_is_named_when_the_others_have_waited_in_vain():
    stopped = 2
    with three_ranks("stopped_rank.py") as ranks:
        assert [process.stdout.readline() for process in ranks] == ["ready\n"] * 3
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        others = [process for rank, process in enumerate(ranks) if rank != stopped]
        for process in others:
            go_on(process)
        for process in others:
            errors = process.communicate(timeout=ENDS_S)[1]
            named = (
                rf"RankFailedError: got rank {stopped} failed in step 3: it was waited for in"
                r" vain.*stopped, or hangs"
            )
            assert process.returncode == 1 and re.search(named, errors), errors


@pytest.fixture
def damaged(data, tmp_path):
    """A copy of the data, for a test to put something wrong into it."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    return folder


def change(path, dtype, columns, value):
    """Set the first column of one sample in the middle of the split."""
    numbers = np.fromfile(path, dtype).reshape(-1, columns)
    numbers[len(numbers) // 2, 0] = value
    numbers.tofile(path)


@pytest.mark.parametrize(
    "what", ["a loss that is no number", "a gradient that is none", "an id outside its table"]
)
def test_the_error_of_one_rank_is_named_by_all(damaged, tmp_path, what, monkeypatch):
    settings = ["model.batch_norm=false"]
    if what == "an id outside its table":
        change(damaged / "train" / "ids.i32", np.int32, 26, 10**6)
        exit_code = 2
        reason = "id 1000000 for feature 'C1'"
    elif what == "a gradient that is none":
        change(damaged / "train" / "dense.f32", np.float32, 13, 1e6)
        settings.append("loss={name='edge_loss:Edge'}")
        monkeypatch.chdir(Path(__file__).parents[1])  # where that lies
        exit_code = 1
        reason = "NonFiniteGradientError: got gradients that are not finite in step"
    else:
        change(damaged / "train" / "dense.f32", np.float32, 13, np.nan)
        exit_code = 1
        reason = "NonFiniteLossError: got loss nan in step"
    recipe = tmp_path / "r.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(make_config(damaged, *settings).model_dump()))
    with Team(recipe, "--run-dir", run, "--ranks", 2) as team:
        assert team.end() == exit_code, team.output
    texts = [team.output, (run / "ranks" / "rank-1.log").read_text()]
    own = reason.partition("Error: got ")[2] or reason
    for text in texts:
        assert "Traceback" not in text
        assert re.search(rf"got: +{own}|rank \d( failed in step \d+)?: (got )?{reason}", text), text
    assert any(
        re.search(rf"rank \d( failed in step \d+)?: (got )?{reason}", text) for text in texts
    ), texts
