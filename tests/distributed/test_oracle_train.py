"""`pibroch train` with a central oracle: the files of `alltoall`, whoever is stopped or killed."""

import json
import os
import re
import signal
import socket
from contextlib import ExitStack

import oracle_cases
import pytest
from launched_team import Team, processes_of, stands_still, steps, wait_until
from role_team import RoleTeam
from test_lookahead_train import COMMON, PURPOSES, check_same_files, curve

from pibroch.config import to_toml
from pibroch.errors import TrainingError
from pibroch.ports import free_port
from pibroch.servers import join, serve_plans
from small_run import make_config, start_command

CENTRAL = ["embedding.exchange=lookahead", "embedding.oracle=central", "embedding.lookahead=5"]


def recipe_of(data, folder, *more):
    path = folder / "central.toml"
    path.write_text(to_toml(make_config(data, *COMMON, *CENTRAL, *more).model_dump()))
    return path


def test_a_stopped_oracle_is_waited_for_and_a_killed_one_is_replaced(data, expected, tmp_path):
    run = tmp_path / "run"
    with Team(recipe_of(data, tmp_path), "--run-dir", run, "--ranks", 2) as team:
        (oracle,) = processes_of(team.wait_for_step(run, 5)[0], "oracle").values()
        os.kill(oracle, signal.SIGSTOP)
        wait_until(lambda: stands_still(run), 60)
        stopped_at = steps(run)
        assert stopped_at < 42
        os.kill(oracle, signal.SIGCONT)
        wait_until(lambda: steps(run) > stopped_at, 60)
        os.kill(oracle, signal.SIGKILL)
        assert team.end() == 0, team.output
        wait_until(team.is_gone, 5)
    for text in (team.output, (run / "ranks" / "rank-1.log").read_text()):
        assert re.search(r"oracle 'oracle0' out of reach.*: another one is waited for", text), text
        assert re.search(r"got \d+ steps again", text) and "Traceback" not in text, text
    lines = (run / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] for line in lines] == [None], "nothing is trained again"
    check_same_files(run, expected)
    assert curve(run) == curve(expected)
    summary = json.loads((run / "summary.json").read_text())
    assert (
        set(summary["bytes_by_purpose"]) == {*PURPOSES, "plans"}
        and min(summary["bytes_by_purpose"].values()) > 0
    )
    assert sum(summary["bytes_by_purpose"].values()) == summary["bytes_sent"]


def test_an_oracle_on_its_own_beside_servers_outlives_trainers(data, expected, tmp_path):
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    recipe = recipe_of(
        data, tmp_path, "embedding.servers=2", f"embedding.rendezvous='{rendezvous}'"
    )
    run = tmp_path / "run"
    with ExitStack() as stack:
        beside = [
            stack.enter_context(start_command(*arguments, "--rendezvous", rendezvous))
            for arguments in (
                ("oracle", "--with-servers"),
                *(("embedding-server", "--number", number) for number in range(2)),
            )
        ]
        with Team(recipe, "--run-dir", run, "--ranks", 2) as team:
            team.wait_for_step(run, 17)
            os.killpg(team.process.pid, signal.SIGKILL)
            team.end()
        with Team("--run-dir", run, "--resume", "--ranks", 2) as team:
            assert team.end() == 0, team.output
        for program in beside:
            program.send_signal(signal.SIGTERM)
            ended = program.end()
            assert ended.returncode == 128 + signal.SIGTERM and "is ready at" in ended.stdout, ended
    check_same_files(run, expected)
    assert curve(run) == curve(expected)


def test_the_loss_of_an_oracle_in_whose_place_none_comes_is_an_error_that_names_it(worlds):
    beside = RoleTeam(1, serve_plans)
    (problem,) = worlds(1).run(oracle_cases.problem_of_loss, beside.rendezvous, beside.pids[0])
    beside.close()
    assert (
        problem[0] == "TrainingError"
        and "oracle 'oracle0' out of reach" in problem[1]
        and problem[2]
    )


def test_an_oracle_that_is_not_there_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        rendezvous = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with start_command("oracle", "--rendezvous", rendezvous) as program:
            ended = program.end()
    assert ended.returncode == 2 and "where oracle 0 cannot listen" in ended.stderr, ended
    with pytest.raises(
        TrainingError,
        match=(
            f"no oracle 0 at {rendezvous} within 1 s.*do: start it: pibroch oracle --rendezvous"
            f" {rendezvous}"
        ),
    ):
        join(rendezvous, 0, 0, timeout_s=1, with_oracle=True)
