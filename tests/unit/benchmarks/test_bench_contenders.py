"""Real workers: pibroch, plain torch and, where installed, the peers."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.agreement import check_agreement
from benchmarks.comparison import OURS, Lineup, arena
from benchmarks.contender import BenchmarkError, Contender, ContenderSpec
from benchmarks.environments import our_python, peers_python
from benchmarks.load import ForeignLoad
from benchmarks.results import write
from benchmarks.rpc_pairs import local_environment
from benchmarks.runner import Schedule, measure
from benchmarks.topics import single_process
from benchmarks.workers import pibroch_tables

from grids import some
from pibroch.errors import MissingDependencyError
from pibroch.planner import Plan
from pibroch.ports import free_port

SHORT = Schedule(rounds=2, steps_per_round=10, warmup_steps=1)


def start(label, worker):
    return Contender(ContenderSpec(label, worker, our_python()))


@pytest.fixture(scope="module")
def pair():
    with start("pibroch", "dlrm_pibroch") as ours, start("plain torch", "dlrm_torch") as torch:
        yield [ours, torch]


@pytest.mark.parametrize(("optimizer", "lr"), [("adagrad", 0.05), ("sgd", 1.0)])
def test_pibroch_and_torch_agree_and_are_timed_in_turn(pair, small_case, optimizer, lr):
    for contender in pair:
        contender.setup(replace(small_case, sparse_optimizer=optimizer, sparse_lr=lr))
    assert check_agreement(pair).largest["loss"] < 1e-5
    times = measure(pair, "step", SHORT)
    assert list(times) == ["pibroch", "plain torch"]
    for own in times.values():
        assert [len(turn) for turn in own.rounds_ms] == [10, 10]
        assert 0 < own.percentile(20) <= own.percentile(50) <= own.percentile(80)
    assert times["pibroch"].ratios_to(times["pibroch"]) == [1.0, 1.0]


@pytest.mark.parametrize("change", [{"sparse_lr": 0.06}, {"dense_lr": 0.5}, {"seed": 3}])
def test_contenders_that_differ_are_not_compared(pair, small_case, change):
    pair[0].setup(small_case)
    pair[1].setup(replace(small_case, **change))
    with pytest.raises(BenchmarkError, match="from plain torch but"):
        check_agreement(pair)


def test_kernel_contenders_agree(small_case):
    workers = {
        "ours": "kernel_pibroch",
        "bag": "kernel_torch",
        "select": "kernel_torch:build_select",
    }
    specs = tuple(ContenderSpec(label, worker, our_python()) for label, worker in workers.items())
    with arena(specs, ForeignLoad()) as contenders:
        outcome = contenders.compare(small_case, ("lookup", "lookup+update"), SHORT, frozenset())
    assert set(outcome.agreement.largest) == {"pooled", "row_movement"}
    assert set(outcome.times["lookup+update"]) == set(workers)


def test_an_idle_worker_uses_no_cpu(pair, small_case):
    """A contender that spins between its turns would slow the others down."""
    for contender in pair:
        contender.setup(replace(small_case, threads=2))
        contender.run("step", 0, 10)
    for _ in range(5):  # one that spins does so each time
        ticks = [_ticks(contender.pid) for contender in pair]
        time.sleep(0.5)
        used = [
            _ticks(contender.pid) - before for contender, before in zip(pair, ticks, strict=True)
        ]
        if max(used) <= 2:
            return
    raise AssertionError(f"CPU ticks of 10 ms used while idle: {used}")


def test_memory_shows_what_the_tables_take(pair, small_case):
    case = replace(small_case, num_rows=200_000, dim=32)
    pair[0].setup(case)
    memory = pair[0].memory()
    assert memory["peak"] >= memory["now"] > memory["baseline"]
    assert memory["now"] - memory["baseline"] > 0.9 * case.parameter_bytes


def test_a_failing_set_up_shows_the_workers_error(pair, small_case):
    with pytest.raises(BenchmarkError, match="torch has no rowwise_adagrad"):
        pair[1].setup(replace(small_case, sparse_optimizer="rowwise_adagrad"))
    assert pair[1].setup(small_case)["torch"], "the worker lives on"


def test_a_killed_worker_is_an_error_not_a_hang(small_case):
    with start("victim", "dlrm_torch") as victim:
        victim.setup(small_case)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(BenchmarkError, match="the worker ended"):
            victim.check(2)


def test_leaving_ends_the_process():
    with start("short", "dlrm_torch") as contender:
        pid = contender.pid
    assert not Path(f"/proc/{pid}").exists()


def test_an_unknown_worker_says_how_to_look(small_case):
    with (
        start("nobody", "no_such_worker") as nobody,
        pytest.raises(BenchmarkError, match="no_such_worker"),
    ):
        nobody.setup(small_case)


def test_rows_of_single_process_reach_the_files(small_case, tmp_path):
    setting = single_process.Setting("zipf", "adagrad", 4)
    here = {
        OURS: "dlrm_pibroch",
        single_process.TORCH: "dlrm_torch",
        single_process.IDEAL: "dlrm_ideal_pibroch",
    }
    lineup = Lineup.of(here, {})
    with arena(lineup.specs, ForeignLoad()) as contenders:
        unlike = frozenset({single_process.IDEAL})
        outcome = contenders.compare(small_case, ("step",), SHORT, frozenset(), unlike)
        assert {"pibroch", "torch", "numba"} <= set(contenders.versions)
    rows = single_process.case_rows(setting, small_case, outcome)
    assert [row["contender"] for row in rows] == list(here)
    assert rows[0]["over_pibroch"] == rows[1]["over_torch"] == 1.0
    assert rows[0]["over_torch"] == pytest.approx(rows[0]["p50_ms"] / rows[1]["p50_ms"])
    assert rows[1]["over_pibroch"] in outcome.times["step"]["plain torch"].ratios_to(
        outcome.times["step"][OURS]
    )
    assert set(single_process.COLUMNS) <= set(rows[0])
    assert "plain torch" in single_process.headline(setting, outcome)
    report = single_process.Report("t", "T", rows, single_process.COLUMNS, single_process.PLOT)
    assert all(
        path.stat().st_size > 0 for path in write(report, tmp_path) if path.name != "origin.json"
    )


def test_missing_peers_leave_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PIBROCH_PEERS_PYTHON", str(tmp_path / "python"))
    with pytest.raises(MissingDependencyError, match=r"install\.sh"):
        peers_python()
    lineup = Lineup.of({OURS: "dlrm_pibroch"}, single_process.TORCHREC_FORMS)
    assert [spec.label for spec in lineup.specs] == [OURS]
    assert "TorchRec DMP" in lineup.notes[0]


@pytest.mark.slow
def test_peers_agree_with_pibroch(small_case):
    try:
        peers_python()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    lineup = Lineup.of({OURS: "dlrm_pibroch"}, single_process.TORCHREC_FORMS)
    with arena(lineup.specs, ForeignLoad()) as contenders:
        for optimizer in ("adagrad", "rowwise_adagrad", "sgd"):
            case = replace(small_case, sparse_optimizer=optimizer)
            outcome = contenders.compare(case, ("step",), SHORT, frozenset())
            assert len(outcome.agreement.contenders) == 4


def _ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    "worker",
    some(
        ["retrieve_pibroch:train_moving", "retrieve_pibroch:train_retrieve", "distributed_pibroch"],
        0,
        2,
    ),
)
def test_a_rank_trains_on_when_its_batches_are_used_up(small_case, tmp_path, worker):
    plan = tmp_path / "plan.json"
    Plan.of(pibroch_tables.tables(small_case), 1, "row_wise").save(plan)
    options = {}
    if worker.startswith("retrieve"):
        options = {"plans": {name: str(plan) for name in ("training", "elsewhere")}}
    spec = ContenderSpec(
        "pibroch",
        worker,
        our_python(),
        environment=local_environment(0, free_port()) | {"WORLD_SIZE": "1"},
    )
    with Contender(spec) as contender:
        contender.setup(replace(small_case, exchange_options=options))
        losses = contender.check(20)["loss"]
    assert len(losses) == 20 and losses[-1] < losses[0]
