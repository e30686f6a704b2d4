"""The state of a row index that learns: with cuts in memory, checkpoints, and any number of ranks.

See ``remembered_rows.py``. The contract: a state belongs to the table, not to a rank. Every rank
has all of it, equal between two steps; so it does not depend on how many there are.
"""

import json
import os
import signal

import numpy as np
import polars as pl
import pytest
from launched_team import Team, steps, wait_until
from test_recovery import ALL_ROLES
from test_timed_checkpoints import check_same

from doc_pages import ROOT
from grids import cells, some
from pibroch.config import to_toml
from pibroch.config.registry import IMPORTS
from pibroch.state.dense import ROW_INDICES
from pibroch.state.tensor_file import load_tensors
from small_run import make_config, run_command

ROWS = [
    "--set", "embedding.rows={name='remembered_rows:Remembered', capacity=12}",
    "--set", "embedding.tables.C2.rows.name=identity",
    "--set", "embedding.exchange.name=remembered_rows:SPEC",
]  # fmt: skip
FROM = {
    "memory": ["--set", "train.cut_every_seconds=0.05"],
    "disk": ["--set", "train.cut_every_seconds=0", "--set", "train.checkpoint_every_seconds=0.05"],
}


def train(recipe, run, ranks, *more):
    with Team(recipe, "--run-dir", run, "--ranks", ranks, *ROWS, *more) as team:
        assert team.end() == 0, team.output


def state_at(run, step):
    return load_tensors(run / "checkpoints" / f"step-{step:08d}", ROW_INDICES)


def losses_of(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [each["loss"] for each in records if each["kind"] == "training"]


@pytest.fixture(scope="module", autouse=True)
def beside_the_module():
    """Processes find what is one's own in the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT / "tests")
        yield


@pytest.fixture(scope="module")
def recipe(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    often = ["train.epochs=6", "train.checkpoint_every=40", "train.evaluate_every=60"]
    path.write_text(to_toml(make_config(data, *often, "train.keep=9").model_dump()))
    return path


@pytest.fixture(scope="module")
def expected(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("expected") / "run"
    train(recipe, run, 2, "--set", "train.checkpoint_every_seconds=0")
    return run


def test_a_state_learns_and_each_read_counts_once(expected):
    """Of one column with each kind; 40 steps of 100 samples."""
    state = state_at(expected, 40)
    assert "C2.id_of_row" not in state and len(state) == 2 * 25
    assert all(state[f"C{n}.reads_of_row"].sum() == 40 * 100 for n in (1, 3, 26))
    ids = state["C1.id_of_row"][1:].tolist()
    assert ids[0] != -1 and ids != sorted(ids), "in the order in which they came"


@pytest.mark.parametrize(("source", "victim"), cells(FROM, (1, 0)))
def test_a_killed_rank_s_run_goes_on_to_the_same_bits_and_state(
    recipe, expected, tmp_path, source, victim
):
    run = tmp_path / "run"
    words = ["--run-dir", run, "--ranks", 2, "--restarts", 9, *ROWS, *FROM[source]]
    with Team(recipe, *words) as team:
        os.kill(team.wait_for_step(run, 50)[victim], signal.SIGKILL)
        wait_until(lambda: (run / "restarts.jsonl").exists() or team.process.poll() is not None)
        before = steps(run)
        wait_until(lambda: steps(run) > before + 3 or team.process.poll() is not None)
        assert team.end() == 0, team.output
    assert ("resumed from memory" in team.output) == (source == "memory"), team.output
    check_same(run, expected)


@pytest.mark.parametrize("ranks", some([1, 4], 1, 2))
def test_it_is_saved_by_two_ranks_and_loaded_by_others(recipe, expected, tmp_path, ranks):
    """The state is that of two ranks, to the bit; rows are within rounding."""
    run = tmp_path / "run"
    until = ["--set", "train.epochs=none", "--set"]
    train(recipe, run, 2, *until, "train.steps=40")
    train(recipe, run, ranks, *until, "train.steps=80", "--resume")
    for step in (40, 80):
        saved, right = (state_at(folder, step) for folder in (run, expected))
        assert saved.keys() == right.keys()
        assert all(saved[name].equal(array) for name, array in right.items())
    losses, right = (losses_of(folder)[:80] for folder in (run, expected))
    np.testing.assert_allclose(losses, right, rtol=1e-3)


def test_any_number_of_ranks_scores_by_it(data, expected, tmp_path):
    """The run's own figures of its best checkpoint, by its own index."""
    for ranks in (1, 2, 4):
        out = ["--out", tmp_path / f"{ranks}.csv", "--ranks", ranks]
        words = ["predict", "--checkpoint", expected, "--data", data, *out]
        ran = run_command(*words, env={IMPORTS: "remembered_rows"})
        assert ran.returncode == 0, ran.stderr
    assert len({(tmp_path / f"{ranks}.csv").read_bytes() for ranks in (1, 2, 4)}) == 1
    scores = pl.read_csv(tmp_path / "4.csv")
    of_label = np.where(scores["label"] == 1, scores["score"], 1 - scores["score"])
    summary = json.loads((expected / "summary.json").read_text())
    assert -np.log(of_label).mean() == pytest.approx(summary["logloss"], rel=1e-5)


def test_rows_on_servers_with_every_role_are_those_of_alltoall(data, tmp_path, monkeypatch):
    """Ids share rows, so that a role that took ids for rows would be out of its tables."""
    monkeypatch.chdir(ROOT / "examples")
    shared = "embedding.rows={name='own_row_index:Shared', capacity=7}"
    short = ["train.epochs=none", "train.steps=30", "train.checkpoint_every=15"]
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(make_config(data, *short).model_dump()))
    for name, settings in {"roles": ALL_ROLES, "alltoall": ["embedding.exchange=alltoall"]}.items():
        words = [word for each in (shared, *settings) for word in ("--set", each)]
        with Team(path, "--run-dir", tmp_path / name, "--ranks", 2, *words) as team:
            assert team.end() == 0, team.output
    check_same(tmp_path / "roles", tmp_path / "alltoall")
