"""Data processors: batches, checkpoints and curves are those of the trainer's loader.

Whoever is killed.
"""

import json
import os
import signal

import processor_cases
import pytest
import training_cases as cases
from launched_team import Team, lives, processes_of, stands_still, steps, wait_until
from role_team import RoleTeam
from test_lookahead_train import curve

from pibroch.config import to_toml
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.ports import free_port
from pibroch.processors import serve
from small_run import files_below, make_config, start_command

ENDS_S = 30.0
RAGGED = ["train.batch_size=97", "train.keep=99", "train.evaluate_every=9", "train.log_every=1"]
"""Of 2,100 samples: the last batch of each epoch holds 63."""


@pytest.fixture(scope="module")
def processors():
    made = RoleTeam(2, serve)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(worlds, data, tmp_path_factory):
    """Runs without processors, by number of ranks."""
    folders = {size: tmp_path_factory.mktemp("expected") / f"{size}" for size in (1, 2)}
    for size, folder in folders.items():
        worlds(size).run(cases.train, make_config(data, *RAGGED).model_dump(), str(folder))
    return folders


def saved(folder):
    """All files of checkpoints, manifests without some parts of the recipe.

    Those that name who makes batches and holds rows.
    """
    files = files_below(folder / "checkpoints")
    for name in [name for name in files if name.endswith("manifest.json")]:
        files[name] = json.loads(files[name])
        del files[name]["config"]["embedding"], files[name]["config"]["data"], files[name]["sha256"]
    return files


def check_same_run(folder, expected):
    files = saved(folder)
    others = saved(expected)
    assert sorted(files) == sorted(others) and "step-00000044" in " ".join(files)
    assert [name for name in files if files[name] != others[name]] == []
    assert curve(folder) == curve(expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_processors", [1, 2])
def test_runs_are_those_of_the_loader_in_the_trainer(
    worlds, data, processors, expected, tmp_path, num_ranks, num_processors
):
    own = [f"data.processors={num_processors}", f"data.rendezvous='{processors.rendezvous}'"]
    reported = worlds(num_ranks).run(
        cases.train, make_config(data, *RAGGED, *own).model_dump(), str(tmp_path / "run")
    )
    check_same_run(tmp_path / "run", expected[num_ranks])
    summary = reported[0]["summary"]
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    evaluated = [record["num_samples"] for record in records if record["kind"] == "evaluation"]
    assert len(evaluated) > 2
    assert summary.bytes_by_purpose["data"] == (2 * 2100 + sum(evaluated)) * 4 * (13 + 26 + 1)
    assert sum(summary.bytes_by_purpose.values()) == summary.bytes_sent


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_in_several_passes(worlds, data, processors, tmp_path, num_ranks):
    passes = ["model.batch_norm=false", *RAGGED, "train.batch_size=33", "train.accumulate=3"]
    own = ["data.processors=2", f"data.rendezvous='{processors.rendezvous}'"]
    for name, words in {"expected": passes, "run": passes + own}.items():
        config = make_config(data, *words).model_dump()
        reported = worlds(num_ranks).run(cases.train, config, str(tmp_path / name))
    check_same_run(tmp_path / "run", tmp_path / "expected")
    assert reported[0]["summary"].bytes_by_purpose["data"] > 0


def test_servers_and_processors_are_one_group(worlds, data, server_team, expected, tmp_path):
    beside = RoleTeam(1, serve, server_team.rendezvous)
    try:
        own = [
            "embedding.exchange=lookahead",
            "embedding.lookahead=5",
            "embedding.servers=2",
            "data.processors=1",
        ]
        rendezvous = [
            f"{table}.rendezvous='{server_team.rendezvous}'" for table in ("embedding", "data")
        ]
        reported = worlds(2).run(
            cases.train,
            make_config(data, *RAGGED, *own, *rendezvous).model_dump(),
            str(tmp_path / "run"),
        )
    finally:
        beside.close()
    check_same_run(tmp_path / "run", expected[2])
    assert {"data", "prefetch", "evict"} <= set(reported[0]["summary"].bytes_by_purpose)


@pytest.mark.parametrize(
    ("split", "batch_size", "shuffle", "part", "skip", "most_bytes"),
    [
        ("train", 97, True, (0, 1), 3, 1 << 28),
        ("train", 64, True, (1, 3), 0, 1),
        ("test", 50, False, (2, 3), 1, 1 << 28),
        ("validation", 10_000, True, (0, 2), 0, 1 << 28),
        ("train", 2, True, (4, 5), 1000, 1 << 28),
    ],
)
def test_batches_are_the_loaders_bag_by_bag(
    worlds, multi_hot, processors, split, batch_size, shuffle, part, skip, most_bytes
):
    own = (split, batch_size, shuffle, part, skip, most_bytes)
    for data in multi_hot:
        worlds(1).run(processor_cases.same_batches, processors.rendezvous, str(data), *own)


@pytest.fixture(scope="module")
def multi_hot(tmp_path_factory):
    """Data whose ids are rows, and raw ones."""
    folder = tmp_path_factory.mktemp("multi_hot")
    options = {"num_samples": 3000, "max_table_rows": 40, "multi_hot": True}
    for name, raw in (("rows", False), ("raw", True)):
        synthesize(SyntheticOptions(**options, raw=raw), folder / name)
    return folder / "rows", folder / "raw"


def test_data_that_are_not_there_or_others_are_refused(worlds, data, processors, tmp_path):
    def problem(path, digest):
        return worlds(1).run(
            processor_cases.problem_of, processors.rendezvous, str(data), path, digest
        )[0]

    kind, text = problem(str(tmp_path / "none"), None)
    assert kind == "DataError" and "none, which has no" in text
    kind, text = problem(None, "0123")
    assert kind == "DataError" and "not the trainers' dataset" in text and "--data" in text


def test_the_command_reads_data_where_it_is_told(worlds, data, server_team, tmp_path):
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    reported = str(data), str(tmp_path / "nowhere"), None
    alone = ["--rendezvous", rendezvous, "--number", 0, "--data", data]
    beside = ["--rendezvous", server_team.rendezvous, "--number", 0, "--with-servers"]
    with (
        start_command("data-processor", *alone) as program,
        start_command("data-processor", *beside) as other,
    ):
        assert worlds(1).run(processor_cases.problem_of, rendezvous, *reported, 1) == [None]
        (problem,) = worlds(1).run(processor_cases.problem_of, server_team.rendezvous, *reported, 1)
        assert problem[0] == "DataError", problem
        for each in (program, other):
            each.send_signal(signal.SIGTERM)
            ended = each.end()
            assert (
                ended.returncode == 128 + signal.SIGTERM
                and "processor0 is ready at" in ended.stdout
            ), ended


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_processor_that_is_gone_is_waited_for_not_met(worlds, server_team, how):
    beside = RoleTeam(
        1, serve if how == "killed" else processor_cases.serve_and_leave, server_team.rendezvous
    )
    beside.close()
    (problem,) = worlds(1).run(processor_cases.problem_of_joining, server_team.rendezvous)
    assert problem[0] == "TrainingError" and "no data processor 0" in problem[1], problem


def test_the_loss_of_all_processors_is_an_error_that_names_one(worlds, data, server_team):
    beside = RoleTeam(1, serve, server_team.rendezvous)
    (problem,) = worlds(1).run(
        processor_cases.problem_of_loss, server_team.rendezvous, str(data), beside.pids
    )
    beside.close()
    assert (
        problem[0] == "TrainingError"
        and "data processor 'processor0' out of reach" in problem[1]
        and problem[2]
    )


def test_a_processor_runs_its_own_functions_only(worlds, processors):
    assert worlds(1).run(processor_cases.is_refused, processors.rendezvous) == [True]


def test_a_stopped_processor_is_waited_for_and_killed_ones_are_started_again(data, tmp_path):
    """Killed processors are named.

    That such a run goes on to the same bits is shown in ``test_recovery.py``.
    """
    recipe = tmp_path / "processors.toml"
    endless = tmp_path / "endless"
    recipe.write_text(to_toml(make_config(data, *RAGGED, "data.processors=2").model_dump()))
    with Team(recipe, "--run-dir", endless, "--ranks", 2, "--set", "train.epochs=1000") as team:
        ranks = team.wait_for_step(endless, 5)
        started = processes_of(ranks[0], "data-processor")
        assert sorted(started) == [0, 1]
        os.kill(started[0], signal.SIGSTOP)
        wait_until(lambda: stands_still(endless), 60)
        stopped_at = steps(endless)
        os.kill(started[0], signal.SIGCONT)
        team.wait_for_step(endless, stopped_at + 5)
        for pid in started.values():  # killed while each owes batches to both ranks
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: stands_still(endless), 60)
        for pid in started.values():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(lives(pid) for pid in successors(ranks[0], started)), 60)
        team.wait_for_step(endless, steps(endless) + 20)
        last = processes_of(ranks[0], "data-processor")
        os.kill(team.process.pid, signal.SIGTERM)
        assert team.end() == 128 + signal.SIGTERM
        wait_until(lambda: not any(map(lives, last.values())), 60)
    assert "data processor 1 ended with signal SIGKILL: it is started again" in team.output
    for text in (team.output, (endless / "ranks" / "rank-1.log").read_text()):
        assert (
            "data processor 'processor1' is lost" in text
            and "data processor 'processor1' is back" in text
        ), text
        assert "Traceback" not in text and "a bug" not in text


def successors(rank, before):
    """Processes of the same numbers, 0 where there is none but the one before."""
    now = processes_of(rank, "data-processor")
    return [
        now[number] if now.get(number) not in (None, pid) else 0 for number, pid in before.items()
    ]
