"""`pibroch train` with samples assigned to ranks by their rows.

Killed and resumed, planned centrally and read by data processors it has the same files; what is
learned is what is learned from samples as they are given, but for rounding.
"""

import json
import os
import signal

import numpy as np
import pytest
import training_cases as cases
from launched_team import Team
from role_team import RoleTeam
from test_lookahead_train import COMMON, check_same_files, curve
from test_processors_train import saved

from pibroch.config import to_toml
from pibroch.processors import serve
from small_run import make_config

ASSIGNED = [
    "embedding.exchange=lookahead",
    "embedding.lookahead=5",
    "embedding.exchange.assign=rows",
]


@pytest.fixture(scope="module")
def expected(worlds, data, tmp_path_factory):
    """A run of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("assigned") / "run"
    config = make_config(data, *COMMON, "train.epochs=4", *ASSIGNED)
    results = worlds(2).run(cases.train, config.model_dump(), str(folder))
    return folder, results


def test_what_is_learned_is_what_is_learned_from_samples_as_they_are_given(
    worlds, data, expected, tmp_path
):
    """With dropout by the place in the global batch, and batch norm over all of it."""
    config = make_config(
        data, *COMMON, "train.epochs=4", *ASSIGNED, "embedding.exchange.assign=given"
    )
    given = worlds(2).run(cases.train, config.model_dump(), str(tmp_path / "given"))
    for ours, theirs in zip(expected[1], given, strict=True):
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-3)
        assert abs(ours["summary"].auc - theirs["summary"].auc) < 1e-3
        assert 0.05 < ours["summary"].transfers_spared < 1
        assert theirs["summary"].transfers_spared is None
        sent = [
            sum(each["summary"].bytes_by_purpose[purpose] for purpose in ("critical", "deferred"))
            for each in (ours, theirs)
        ]
        assert sent[0] < sent[1]
    records = map(json.loads, (expected[0] / "metrics.jsonl").read_text().splitlines())
    shares = [record["transfers_spared"] for record in records if record["kind"] == "training"]
    assert all(0 <= share < 1 for share in shares) and max(shares) > 0.05


@pytest.mark.parametrize("exchange", ["alltoall", "retrieve", "lookahead"])
def test_losses_differ_by_rounding_alone(worlds, data, tmp_path, exchange):
    """Under plain gradient descent, which magnifies none."""
    losses = []
    plain = [f"{table}={{name='sgd', lr=0.1}}" for table in ("optimizer", "embedding.optimizer")]
    for assign in ("rows", "given"):
        own = [f"embedding.exchange={exchange}", f"embedding.exchange.assign={assign}"]
        config = make_config(data, *COMMON, *plain, *own).model_dump()
        results = worlds(2).run(cases.train, config, str(tmp_path / assign))
        losses.append(results[0]["losses"])
        spared = results[0]["summary"].transfers_spared
        assert spared is None if assign == "given" else 0.05 < spared < 1
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_rows_that_are_to_follow_the_data_are_refused(worlds, data, tmp_path):
    """Before the first step."""
    tables = {f"C{number}": {"kind": "row_wise", "shards": [0, 1]} for number in range(1, 27)}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"num_shards": 2, "placements": tables}))
    own = ["embedding.exchange=alltoall", "embedding.exchange.assign=rows", "train.replan_above=2"]
    config = make_config(data, *own, f"embedding.exchange.plan='{plan}'").model_dump()
    messages = worlds(2).run(cases.name_what_differs, [config] * 2, str(tmp_path / "run"))
    assert all("replan_above where samples are assigned" in message for message in messages)


def test_killed_and_resumed(data, expected, tmp_path):
    recipe = tmp_path / "recipe.toml"
    config = make_config(data, *COMMON, "train.epochs=4", *ASSIGNED)
    recipe.write_text(to_toml(config.model_dump()))
    folder = tmp_path / "killed"
    with Team(recipe, "--run-dir", folder, "--ranks", 2) as team:
        team.wait_for_step(folder, 9)
        os.killpg(team.process.pid, signal.SIGKILL)
        team.end()
    with Team("--run-dir", folder, "--resume", "--ranks", 2) as team:
        assert team.end() == 0, team.output
        assert "transfers spared" in team.output
    check_same_files(folder, expected[0])
    assert curve(folder) == curve(expected[0])


def test_a_central_oracle_and_data_processors(worlds, data, expected, oracle_team, tmp_path):
    beside = RoleTeam(2, serve, oracle_team.rendezvous)
    try:
        own = ["embedding.oracle=central", "data.processors=2"]
        rendezvous = [
            f"{table}.rendezvous='{oracle_team.rendezvous}'" for table in ("embedding", "data")
        ]
        config = make_config(data, *COMMON, "train.epochs=4", *ASSIGNED, *own, *rendezvous)
        worlds(2).run(cases.train, config.model_dump(), str(tmp_path / "run"))
    finally:
        beside.close()
    assert saved(tmp_path / "run") == saved(expected[0])
    assert curve(tmp_path / "run") == curve(expected[0])
