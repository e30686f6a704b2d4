"""`pibroch train` with embedding servers: the files of `alltoall`, whoever is stopped or killed.

A lost server is named.
"""

import json
import os
import re
import shutil
import signal
import socket
import time
from contextlib import ExitStack

import pytest
import training_cases as cases
from launched_team import Team, lives, processes_of, stands_still, steps, wait_until
from test_lookahead_train import COMMON, PURPOSES, check_same_files, curve

from doc_pages import ROOT
from pibroch.config import to_toml
from pibroch.errors import TrainingError
from pibroch.ports import free_port
from pibroch.servers.group import join
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import files_below, make_config, start_command

ENDS_S = 30.0
SERVERS = ["embedding.exchange=lookahead", "embedding.servers=2", "embedding.lookahead=5"]


def recipe_of(data, folder, *more):
    path = folder / "servers.toml"
    path.write_text(to_toml(make_config(data, *COMMON, *SERVERS, *more).model_dump()))
    return path


def test_a_stopped_server_is_waited_for_and_a_killed_one_is_named_by_all(data, expected, tmp_path):
    run = tmp_path / "run"
    with Team(recipe_of(data, tmp_path, "train.epochs=40"), "--run-dir", run, "--ranks", 2) as team:
        ranks = team.wait_for_step(run, 5)
        servers = processes_of(ranks[0], "embedding-server")
        assert sorted(servers) == [0, 1]
        os.kill(servers[1], signal.SIGSTOP)
        wait_until(lambda: stands_still(run), 60)
        stopped_at = steps(run)
        os.kill(servers[1], signal.SIGCONT)
        team.wait_for_step(run, max(43, stopped_at + 5))
        os.kill(servers[0], signal.SIGKILL)
        start = time.monotonic()
        assert team.end() == 1
        assert time.monotonic() - start < ENDS_S
        wait_until(team.is_gone, ENDS_S)
        wait_until(lambda: not lives(servers[1]), ENDS_S)
    for text in (team.output, (run / "ranks" / "rank-1.log").read_text()):
        assert re.search(r"embedding server 'embedding0' out of reach", text), text
        assert "Traceback" not in text and "a bug" not in text and "c10d" not in text
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [[r["step"], r["loss"]] for r in records if r["kind"] == "training"]
    right = [json.loads(line) for line in (expected / "metrics.jsonl").read_text().splitlines()]
    assert losses[:42] == [[r["step"], r["loss"]] for r in right if r["kind"] == "training"]


def test_servers_outlive_trainers_that_are_killed_and_resume(data, expected, tmp_path):
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    recipe = recipe_of(data, tmp_path, f"embedding.rendezvous='{rendezvous}'")
    run = tmp_path / "run"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                start_command("embedding-server", "--rendezvous", rendezvous, "--number", number)
            )
            for number in (1, 0)
        ]
        with Team(recipe, "--run-dir", run, "--ranks", 2) as team:
            team.wait_for_step(run, 9)
            os.killpg(team.process.pid, signal.SIGKILL)
            team.end()
        left_at = CheckpointFolder(run / "checkpoints", 99).steps()
        assert 7 in left_at and 42 not in left_at
        with Team("--run-dir", run, "--resume", "--ranks", 2) as team:
            assert team.end() == 0, team.output
        for server in servers:
            server.send_signal(signal.SIGTERM)
            ended = server.end()
            assert ended.returncode == 128 + signal.SIGTERM and "is ready at" in ended.stdout, ended
    check_same_files(run, expected)
    assert curve(run) == curve(expected)
    summary = json.loads((run / "summary.json").read_text())
    assert (
        set(summary["bytes_by_purpose"]) == PURPOSES
        and min(summary["bytes_by_purpose"].values()) > 0
    )
    assert sum(summary["bytes_by_purpose"].values()) == summary["bytes_sent"]


def test_incremental_checkpoints_and_averages_are_those_of_alltoall(
    worlds, server_team, data, tmp_path
):
    """Step 18 is saved with the second incremental checkpoint in a row, step 42 with a full one."""

    def train(folder, size, num_steps, *more):
        config = make_config(
            data,
            "train.keep=99",
            "train.full_checkpoint_every=3",
            "train.checkpoint_every=6",
            "train.average=0.9",
            "train.evaluate_every=1000",
            "train.log_every=1",
            f"train.steps={num_steps}",
            *more,
        )
        return worlds(size).run(cases.train, config.model_dump(), str(tmp_path / folder))

    train("whole", 2, 42, "embedding.exchange=alltoall")
    train(
        "resumed",
        2,
        18,
        *SERVERS,
        "embedding.servers=3",
        f"embedding.rendezvous='{server_team.rendezvous}'",
    )
    train("resumed", 2, 42, *SERVERS, "embedding.cache=partitioned")
    last = [
        files_below(tmp_path / folder / "checkpoints" / "step-00000042")
        for folder in ("resumed", "whole")
    ]
    assert sorted(last[0]) == sorted(last[1])
    increments = sorted(tmp_path.glob("resumed/checkpoints/step-*/tables/*@step-*"))
    assert {path.parent.parent.name for path in increments} >= {"step-00000012", "step-00000018"}
    assert [
        name for name in last[1] if last[0][name] != last[1][name] and name != "manifest.json"
    ] == []


def test_an_optimizer_of_one_s_own_is_made_by_those_who_were_told_its_module(
    data, tmp_path, monkeypatch
):
    """Servers of the run inherit the recipe's consent; one that runs already has to be told."""
    shutil.copy(ROOT / "examples" / "own_optimizer.py", tmp_path / "lions.py")
    monkeypatch.chdir(tmp_path)
    lion = ["--set", "embedding.optimizer={name='lions:Lion', lr=0.01, betas=[0.8, 0.9]}"]
    short = ["train.epochs=none", "train.steps=8", "train.evaluate_every=1000"]
    recipe = recipe_of(data, tmp_path, *short)
    with Team(recipe, "--run-dir", tmp_path / "own", "--ranks", 2, *lion) as team:
        assert team.end() == 0, team.output
    for told in (False, True):
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        words = ["embedding-server", "--rendezvous", rendezvous, "--number"]
        before = ["--import", "lions"] if told else []
        settings = [*lion, "--set", f"embedding.exchange.rendezvous={rendezvous}"]
        with ExitStack() as stack:
            for number in (0, 1):
                stack.enter_context(start_command(*before, *words, number))
            run = tmp_path / f"told-{told}"
            with Team(recipe, "--run-dir", run, "--ranks", 2, *settings) as team:
                assert team.end() == (0 if told else 2), team.output
        refusal = r"got: +sparse optimizer 'lions:Lion' for an embedding server.*--import lions emb"
        assert told or re.search(refusal, team.output, re.S), team.output
    exchange = ["--set", "embedding.exchange=alltoall"]
    with Team(recipe, "--run-dir", tmp_path / "alltoall", "--ranks", 2, *lion, *exchange) as team:
        assert team.end() == 0, team.output
    for folder in ("own", "told-True"):
        check_same_files(tmp_path / folder, tmp_path / "alltoall")


def test_what_cannot_be_met_is_said(data, tmp_path):
    with start_command(
        "embedding-server", "--rendezvous", "http://localhost", "--number", 0
    ) as program:
        ended = program.end()
    assert (
        ended.returncode == 2
        and "rendezvous 'http://localhost'" in ended.stderr
        and "tcp://HOST:PORT" in ended.stderr
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        rendezvous = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with start_command(
            "embedding-server", "--rendezvous", rendezvous, "--number", 0
        ) as program:
            ended = program.end()
    assert ended.returncode == 2 and "where embedding server 0 cannot listen" in ended.stderr, ended
    with pytest.raises(
        TrainingError,
        match=(
            f"no embedding server 0 at {rendezvous}.*pibroch embedding-server --rendezvous"
            f" {rendezvous}"
        ),
    ):
        join(rendezvous, 2, 0, timeout_s=1)
