"""Runs on tables of raw ids that are killed, or go on with other ranks.

Where they go on with as many, they have the bits of a run that was not interrupted. The ids that
have rows are the same with any number of ranks.
"""

import os
import signal

import numpy as np
import pytest
from launched_team import Team, steps, wait_until
from test_row_index_train import FROM, losses_of, state_at
from test_timed_checkpoints import check_same

from grids import cells, some
from pibroch.config import to_toml
from small_run import make_config

HASHED = [
    "train.batch_size=12",
    "embedding.rows={name='hashed', capacity=16, admit_after=2}",
    "embedding.tables.C2.rows=identity",
    "embedding.tables.C3.rows={name='hashed', capacity=13, evict='least_frequent', half_life=9}",
    "embedding.tables.C4.rows={name='hashed', capacity=40, expire_after=6}",
]
WAYS = {
    "alltoall": ["embedding.exchange=alltoall"],
    "lookahead": ["embedding.exchange=lookahead", "embedding.lookahead=4"],
}


@pytest.fixture(scope="module")
def recipe(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    often = ["train.epochs=none", "train.steps=80", "train.checkpoint_every=40", "train.keep=9"]
    config = make_config(data, *often, "train.evaluate_every=40", *HASHED)
    path.write_text(to_toml(config.model_dump()))
    return path


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory):
    """What is not interrupted, by exchange and number of ranks."""
    found = {}

    def run(way, ranks):
        if (way, ranks) not in found:
            found[way, ranks] = tmp_path_factory.mktemp("runs") / f"{way}-{ranks}"
            train(recipe, found[way, ranks], ranks, way, "train.checkpoint_every_seconds=0")
        return found[way, ranks]

    return run


def train(recipe, run, ranks, way, *settings, resume=False):
    words = [word for each in (*WAYS[way], *settings) for word in ("--set", each)]
    resuming = ["--resume"] if resume else []
    with Team(recipe, "--run-dir", run, "--ranks", ranks, *words, *resuming) as team:
        assert team.end() == 0, team.output


@pytest.mark.parametrize(("way", "source"), cells(WAYS, FROM))
def test_a_killed_rank_s_run_goes_on_to_the_same_bits(recipe, runs, tmp_path, way, source):
    run = tmp_path / "run"
    words = [word for each in WAYS[way] for word in ("--set", each)]
    words = ["--run-dir", run, "--ranks", 2, "--restarts", 9, *words, *FROM[source]]
    with Team(recipe, *words) as team:
        os.kill(team.wait_for_step(run, 45)[1], signal.SIGKILL)
        wait_until(lambda: (run / "restarts.jsonl").exists() or team.process.poll() is not None)
        before = steps(run)
        wait_until(lambda: steps(run) > before + 3 or team.process.poll() is not None)
        assert team.end() == 0, team.output
    assert ("resumed from memory" in team.output) == (source == "memory"), team.output
    check_same(run, runs(way, 2))


@pytest.mark.parametrize("ranks", some([1, 2, 3], 0, 2))
def test_four_ranks_checkpoint_is_gone_on_with_by_fewer(recipe, runs, tmp_path, ranks):
    """The ids are those of the four, to the bit, and rows are within rounding."""
    expected = runs("alltoall", 4)
    moved = tmp_path / "moved"
    train(recipe, moved, 4, "alltoall", "train.steps=40")
    train(recipe, moved, ranks, "alltoall", "train.steps=80", resume=True)
    for step in (40, 80):
        saved, right = (state_at(folder, step) for folder in (moved, expected))
        assert saved.keys() == right.keys() and len(right) > 25
        assert all(saved[name].equal(array) for name, array in right.items())
    np.testing.assert_allclose(losses_of(moved), losses_of(expected), rtol=2e-3)
    assert losses_of(moved)[:40] == losses_of(expected)[:40]


@pytest.mark.parametrize("ranks", some([1, 3], 1, 2))
def test_as_many_ranks_go_on_to_the_same_bits(recipe, runs, tmp_path, ranks):
    train(recipe, tmp_path / "run", ranks, "alltoall", "train.steps=40")
    train(recipe, tmp_path / "run", ranks, "alltoall", "train.steps=80", resume=True)
    assert losses_of(tmp_path / "run") == losses_of(runs("alltoall", ranks))
