"""Ranks are started, speak, stop and die as one."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from launched_team import Team, lives, wait_until

from pibroch.config import to_toml
from small_run import command, files_below, make_config, run_command

STOP_S = 60.0
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "pibroch",
]


@pytest.fixture
def recipe(data, tmp_path):
    return written(tmp_path, data)


def written(folder, data, *more):
    path = folder / "recipe.toml"
    path.write_text(
        to_toml(make_config(data, "train.steps=12", "train.evaluate_every=6", *more).model_dump())
    )
    return path


def test_ranks_and_torchrun_end_with_the_same_bits(data, tmp_path):
    """Nothing is forked here, embedding servers included."""
    recipe = written(
        tmp_path,
        data,
        "embedding.exchange=lookahead",
        "embedding.lookahead=2",
        "embedding.servers=1",
    )
    ours = tmp_path / "ours"
    by_torchrun = tmp_path / "theirs"
    with (
        Team(recipe, "--run-dir", ours, "--ranks", 2, program=command()) as team,
        Team(recipe, "--run-dir", by_torchrun, program=TORCHRUN) as other,
    ):
        assert team.end() == 0, team.output
        assert other.end() == 0, other.output
    assert files_below(ours / "checkpoints") == files_below(by_torchrun / "checkpoints")
    summary = json.loads((ours / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["bytes_sent"] == summary["bytes_received"] > 0
    for text in (team.output, other.output):
        assert (
            text.count(f"test AUC {summary['auc']:.4f}") == 1 and text.count("best so far") <= 3
        ), "one rank speaks"
    for run in (ours, by_torchrun):
        assert "validation: AUC" in (run / "ranks" / "rank-1.log").read_text()
        records = [
            json.loads(line)
            for line in (run / "ranks" / "metrics-1.jsonl").read_text().splitlines()
        ]
        assert [record["step"] for record in records if record["kind"] == "training"] == list(
            range(1, 13)
        )


@pytest.mark.parametrize("how", ["launcher SIGTERM", "terminal SIGINT", "launcher SIGKILL"])
@pytest.mark.alone  # looks at /dev/shm and at all ports
def test_all_end_together_and_leave_nothing_behind(recipe, tmp_path, how):
    run = tmp_path / "run"
    shared_memory = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    whom = how.split()[0]
    number = getattr(signal, how.split()[1])
    endless = ["--set", "train.steps=1000000", "--set", "train.checkpoint_every=2"]
    with Team(recipe, "--run-dir", run, "--ranks", 2, *endless) as team:
        ranks = team.wait_for_step(run, 3)
        assert sorted(ranks) == [0, 1]
        ports = [port for pid in ranks.values() for port in listening(pid)]
        assert ports, "rank 0 listens for the process group"
        (os.killpg if whom == "terminal" else os.kill)(team.process.pid, number)
        code = team.end(STOP_S)
        wait_until(team.is_gone, STOP_S)
        assert not any(lives(pid) for pid in ranks.values())
    if number == signal.SIGKILL:
        return
    assert code == 128 + number
    assert team.output.count("--resume") == 1 and "Traceback" not in team.output
    assert not [
        path
        for path in (run / "checkpoints").iterdir()
        if path.name.startswith(".") or path.suffix == ".new"
    ]
    if Path("/dev/shm").exists():
        assert set(Path("/dev/shm").iterdir()) <= shared_memory
    assert not set(ports) & listening_anywhere()


def test_what_rank_0_refuses_is_said_once(recipe, tmp_path):
    for arguments in (["--data", tmp_path / "none"], ["--set", "model.dim=0"]):
        ended = run_command(
            "train", recipe, "--run-dir", tmp_path / "run", "--ranks", 2, *arguments
        )
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.count("got:") == 1, ended.stderr

        assert not (tmp_path / "run").exists()


def listening(pid):
    """Ports on which a process listens."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    return [port for inode, port in sockets(pid) if f"socket:[{inode}]" in own]


def listening_anywhere():
    return {port for _, port in sockets("self")}


def sockets(pid):
    """Inode and port of the listening sockets in a process's network."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [(line[9], int(line[1].rpartition(":")[2], 16)) for line in lines if line[3] == "0A"]
