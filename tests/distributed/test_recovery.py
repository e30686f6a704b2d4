"""Whatever dies, the run ends with the bits of one that nothing happened to.

By itself, and it says what was lost.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import training_cases as cases
from launched_team import Team, lives, processes_of, steps, wait_until
from test_timed_checkpoints import check_same

from grids import some
from pibroch.config import to_toml
from pibroch.ports import free_port
from small_run import make_config, run_command

KILLS = int(os.environ.get("PIBROCH_SOAK_KILLS", "0"))
SEED = int(os.environ.get("PIBROCH_SOAK_SEED", random.SystemRandom().randrange(1 << 30)))
COMMON = [
    "train.epochs=10",
    "train.checkpoint_every=50",
    "train.evaluate_every=150",
    "train.keep=1",
]
ALL_ROLES = [
    "embedding.exchange=lookahead",
    "embedding.lookahead=3",
    "embedding.exchange.servers=2",
    "embedding.exchange.oracle=central",
    "data.processors=2",
]
OFTEN = ["--set", "train.checkpoint_every_seconds=0.05"]
FROM = {
    "memory": ["--set", "train.cut_every_seconds=0.1"],
    "memory and disk": ["--set", "train.cut_every_seconds=0.3", *OFTEN],
    "disk": ["--set", "train.cut_every_seconds=0", *OFTEN],
}
STOP_S = 3.0
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "--max-restarts", "1", "-m", "pibroch",
]  # fmt: skip
LOST = {
    "embedding-server": (
        r"embedding server \d ended with signal SIGKILL|embedding server 'embedding\d' out of reach"
        r"|rank \d failed in step \d+: TrainingError"
    ),
    "rank": r"rank \d ended with signal SIG(KILL|TERM)",
}


@pytest.fixture(scope="module")
def expected(worlds, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected") / "run"
    worlds(2).run(
        cases.train,
        make_config(data, *COMMON, "train.checkpoint_every_seconds=0").model_dump(),
        str(folder),
    )
    return folder


def everyone(team):
    """Processes of the run by name."""
    pids = {f"rank {rank}": pid for rank, pid in team.pids().items()}
    for role in ("embedding-server", "oracle", "data-processor"):
        children = processes_of(pids["rank 0"], role) if "rank 0" in pids else {}
        pids |= {f"{role} {number}": pid for number, pid in children.items()}
    return pids


def restarts(run):
    path = run / "restarts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def from_checkpoints(run):
    """Restarts of all, not of a process that the others waited for."""
    return [restart for restart in restarts(run) if restart["from_step"] is not None]


def start(data, folder, source, *settings):
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(make_config(data, *COMMON, *settings).model_dump()))
    return Team(
        recipe, "--run-dir", folder / "run", "--ranks", 2, "--restarts", 1000, *FROM[source]
    )


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_whatever_is_killed_the_run_goes_on_to_the_same_bits(data, expected, tmp_path, source):
    run = tmp_path / "run"
    seen = set()
    with start(data, tmp_path, source, *ALL_ROLES) as team:
        wait_until(lambda: len(everyone(team)) == 7 and steps(run) > 5, 120)
        for number, victim in enumerate(["data-processor 1", "oracle 0"]):
            os.kill(everyone(team)[victim], signal.SIGKILL)
            wait_until(lambda: len(restarts(run)) > number or team.process.poll() is not None, 60)  # noqa: B023
            assert (
                restarts(run)[number]["reason"]
                == f"{victim.replace('-', ' ')} ended with signal SIGKILL"
            )
            assert not from_checkpoints(run), "nothing is trained again"
        for number, victims in enumerate(
            [["embedding-server 1"], ["rank 1", "oracle 0"], ["rank 0", "data-processor 0"]], 1
        ):
            before = steps(run)
            wait_until(lambda: len(everyone(team)) == 7 and steps(run) > before + 5, 120)  # noqa: B023
            processes = everyone(team)
            seen |= set(processes.values())
            if (
                "rank 0" in victims
            ):  # what it started does not outlive it, not even when it reads nothing
                os.kill(processes["embedding-server 0"], signal.SIGSTOP)
            for victim in victims:
                # one that is told to end is lost, too, where the launcher is not
                how = signal.SIGTERM if victim == "rank 1" else signal.SIGKILL
                os.kill(processes[victim], how)
            wait_until(
                lambda n=number: len(from_checkpoints(run)) == n or team.process.poll() is not None,
                60,
            )
            reason = from_checkpoints(run)[-1]["reason"]
            assert re.search(LOST[victims[0].split()[0]], reason), (restarts(run), team.output)
        assert team.end() == 0, team.output
        assert not [pid for pid in seen if lives(pid)]
    check_same(run, expected)
    assert team.output.count("starting again from step") == 3
    resumed = team.output.count("resumed from memory")  # the ends of other ranks' logs say so, too
    assert resumed >= 3 if source == "memory" else resumed == 0
    assert json.loads((run / "summary.json").read_text())["restarts"] == len(restarts(run)) >= 5
    assert run_command("report", run).returncode == 0
    assert "embedding server" in (run / "report.html").read_text()


def test_restarts_are_used_up_and_wrong_input_uses_none(data, tmp_path):
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(make_config(data, *COMMON).model_dump()))
    with Team(recipe, "--run-dir", run, "--ranks", 1, "--restarts", 1) as team:
        for number in range(2):
            team.wait_for_step(run, 3)
            wait_until(
                lambda n=number: len(team.pids()) == 1 and (n == 0 or len(restarts(run)) == 1), 60
            )
            os.kill(team.pids()[0], signal.SIGKILL)
            wait_until(lambda: len(restarts(run)) == 1, 60)
        assert team.end() == 128 + signal.SIGKILL
    assert "1 restarts within an hour are used up" in team.output
    with Team(
        recipe,
        "--run-dir",
        tmp_path / "other",
        "--ranks",
        2,
        "--restarts",
        9,
        "--set",
        "embedding.optimizer.lr=1e30",
    ) as team:
        assert team.end() == 1, team.output
    assert "NaN" in team.output or "nan" in team.output
    assert not restarts(tmp_path / "other")


@pytest.mark.slow
def test_torchrun_starts_again_what_was_killed(data, expected, tmp_path):
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(make_config(data, *COMMON).model_dump()))
    with Team(recipe, "--run-dir", run, "--resume", *OFTEN, program=TORCHRUN) as team:
        os.kill(team.wait_for_step(run, 60)[1], signal.SIGKILL)
        assert team.end() == 0, team.output
    assert team.output.count("resumed from") == 1
    check_same(run, expected)


def test_fewer_ranks_go_on_where_more_get_no_further(data, tmp_path):
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(make_config(data, *COMMON).model_dump()))
    with Team(recipe, "--run-dir", run, "--ranks", 2, "--restarts", 9, "--least-ranks", 1) as team:
        killed = set()
        while team.process.poll() is None and not (run / "metrics.jsonl").exists():
            for pid in set(team.pids().values()) - killed if len(team.pids()) == 2 else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert team.end() == 0, team.output
    assert "going on with 1 ranks" in team.output
    assert json.loads((run / "summary.json").read_text())["world_size"] == 1


ELASTIC = [
    "--nnodes",
    "1:2",
    "--nproc-per-node",
    "1",
    "--rdzv-backend",
    "c10d",
    "--max-restarts",
    "9",
]


# agents that do not hear of each other for three seconds take each other for lost
@pytest.mark.alone
@pytest.mark.slow
def test_machines_leave_and_join_under_torchrun(data, tmp_path):
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    port = free_port()
    often = [
        "train.epochs=1000",
        "train.checkpoint_every_seconds=0.3",
        "train.log_every=5",
        "train.checkpoint_every=100000",
    ]
    recipe.write_text(
        to_toml(make_config(data, *often, "train.evaluate_every=1000000").model_dump())
    )
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }

    def agent(is_host):
        short = (
            f"is_host={is_host},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        )
        where = [
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-conf",
            short,
            "--monitor-interval",
            "0.1",
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *ELASTIC,
            *where,
            "-m",
            "pibroch",
            "train",
            recipe,
        ]
        return subprocess.Popen(
            [*command, "--run-dir", run, "--resume"],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_for_ranks(count):
        path = run / "ranks.json"
        before = steps(run)
        wait_until(lambda: path.exists() and json.loads(path.read_text())["ranks"] == count, 100)
        wait_until(lambda: steps(run) > before + 3, 60)

    agents = [agent(1), agent(0)]
    try:
        wait_for_ranks(2)
        wait_until(lambda: any((run / "recovery").glob("step-*")), 60)
        os.killpg(agents[1].pid, signal.SIGKILL)
        wait_for_ranks(1)
        agents.append(agent(0))
        wait_for_ranks(2)
    finally:
        for each in agents:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    reasons = [restart["reason"] for restart in restarts(run)]
    assert reasons == ["ranks: 2 before, 1 from here on", "ranks: 1 before, 2 from here on"]
    assert all(restart["from_step"] > 0 for restart in restarts(run))


@pytest.mark.parametrize("exchange", some(["retrieve", "alltoall", "lookahead"], 0, 2))
def test_cuts_in_memory_have_the_marks_of_checkpoints_that_hold_what_changed(
    worlds, data, tmp_path, exchange
):
    """Incremental checkpoints, averages and rows of 16 bits.

    After deaths the files of a run that nothing happened to.
    """
    settings = [
        "train.epochs=5",
        "train.checkpoint_every=20",
        "train.full_checkpoint_every=3",
        "train.keep=9",
        f"embedding.exchange={exchange}",
        "train.average=0.9",
        "embedding.dtype=bfloat16",
    ]
    config = make_config(data, *settings, "train.checkpoint_every_seconds=0").model_dump()
    worlds(2).run(cases.train, config, str(tmp_path / "expected"))
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(config))
    with Team(
        recipe,
        "--run-dir",
        run,
        "--ranks",
        2,
        "--restarts",
        9,
        "--set",
        "train.cut_every_seconds=0.01",
        *OFTEN,
    ) as team:
        for number, rank in enumerate((1, 0), 1):
            before = steps(run)
            wait_until(lambda: steps(run) > before + 15 or team.process.poll() is not None, 60)  # noqa: B023
            os.kill(team.pids()[rank], signal.SIGKILL)
            wait_until(lambda: len(restarts(run)) == number or team.process.poll() is not None, 60)  # noqa: B023
        assert team.end() == 0, team.output
    assert team.output.count("resumed from memory") >= 2, team.output
    check_same(run, tmp_path / "expected")


SOAKED = {
    "alltoall": ["embedding.exchange=alltoall"],
    "retrieve": ["embedding.exchange=retrieve"],
    "lookahead": ["embedding.exchange=lookahead"],
    "all roles": ALL_ROLES,
}


@pytest.mark.skipif(not KILLS, reason="PIBROCH_SOAK_KILLS=300 asks for it")
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize("exchange", SOAKED)
def test_random_kills(data, expected, tmp_path, exchange, source):
    """One or two at once, at any moment, also while they are starting, save or evaluate.

    Some are stopped for a while.
    """
    chance = random.Random(SEED)
    killed = 0
    most = -(-KILLS // len(SOAKED) // len(FROM))
    run = tmp_path / "run"
    while killed < most:
        with start(data, tmp_path, source, *SOAKED[exchange]) as team:
            while team.process.poll() is None and killed < most:
                pause = chance.uniform(0, 3)
                with suppress(AssertionError):
                    wait_until(lambda: team.process.poll() is not None, pause)
                processes = everyone(team)
                for victim in chance.sample(
                    sorted(processes), min(len(processes), chance.choice([1, 1, 2]))
                ):
                    with suppress(ProcessLookupError):
                        if chance.random() < 0.1:
                            os.kill(processes[victim], signal.SIGSTOP)
                            threading.Timer(STOP_S, go_on, [processes[victim]]).start()
                        else:
                            os.kill(processes[victim], signal.SIGKILL)
                        killed += 1
            assert team.end() == 0, (SEED, team.output)
        check_same(run, expected)
        run.rename(tmp_path / f"run-{killed}")


def go_on(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
