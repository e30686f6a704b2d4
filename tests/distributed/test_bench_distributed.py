"""Teams of real workers on real hosts of a lab, small enough for a test."""

import os
import signal
import time
from dataclasses import replace

import pytest
from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup
from benchmarks.contender import BenchmarkError, answers
from benchmarks.lab import Lab, obstacle
from benchmarks.runner import Schedule
from benchmarks.team import teams
from benchmarks.topics import distributed as topic
from benchmarks.workloads import Workload

HINDRANCE = obstacle()
pytestmark = [
    pytest.mark.alone,  # a lab, and times on its links
    pytest.mark.skipif(HINDRANCE is not None, reason=f"no lab here: {HINDRANCE}"),
]

HOSTS = 2
BATCH_SIZE = 32
SHORT = Schedule(rounds=1, steps_per_round=10, warmup_steps=1)
PIPELINED = "TorchRec pipelined"
SETTING = topic.Setting("zipf", HOSTS, 4, ("200mbit",))


@pytest.fixture
def case(tmp_path):
    """Three tables, dim 4, four global batches of 2 x 32.

    Of so many rows that TorchRec's planner does not replicate them.
    """
    workload = Workload(
        "zipf", num_batches=4, batch_size=HOSTS * BATCH_SIZE, num_tables=3, num_rows=20_000
    )
    path = workload.write(tmp_path)
    return Case(str(path), 4, BATCH_SIZE, 3, 20_000, sparse_optimizer="rowwise_adagrad", threads=1)


@pytest.fixture
def specs():
    here = {OURS: "distributed_pibroch", **topic.IDEAL_FORMS}
    return Lineup.of(
        here, {PIPELINED: topic.TORCHREC_FORMS[PIPELINED]}
    ).specs  # without TorchRec where it is absent


@pytest.mark.slow
def test_a_measurement_from_start_to_a_rank_that_fails(case, specs):
    with Lab(HOSTS, rate="200mbit") as lab:
        with pytest.raises(BenchmarkError, match="No such file"), teams(specs, lab) as running:
            check_measurement(lab, running, case)
            check_a_killed_rank(running[0])
            for member, data in zip(running[1].members, (case.data, "absent.npz"), strict=True):
                member.send({"do": "setup", "case": replace(case, data=data).as_json()})
            answers(running[1].members)
        assert lab.network.pids() == []


def check_measurement(lab, running, case):
    for team in running:
        assert team.setup(case)["torch"]
    agreements = topic.check(running)
    assert agreements[-1].contenders == tuple(topic.IDEAL_FORMS)
    if len(running) > 3:
        assert agreements[0].contenders == (OURS, PIPELINED)
        assert 0 < agreements[0].largest["loss"] < 1e-5
    outcome = topic.measure_at("100mbit", lab, running, SHORT)
    check_rows(
        topic.case_rows(
            SETTING, outcome, {team.spec.label: team.memory()["peak"] for team in running}
        )
    )
    assert "the ideal's" in topic.headline(SETTING, outcome)


def check_a_killed_rank(team):
    os.kill(team.members[1].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(BenchmarkError, match="pibroch failed"):
        team.run("step", 0, 10)
    assert time.monotonic() - start < 20, "nobody waits for a dead rank"


def check_rows(rows):
    by_label = {row["contender"]: row for row in rows}
    assert set(topic.COLUMNS) <= set(rows[0])
    layers = ((13, 512), (512, 256), (256, 4), (10, 512), (512, 256), (256, 1))
    dense_mb = 4 * sum(wide * (width + 1) for width, wide in layers) / 1e6
    for label in topic.IDEAL_FORMS:  # two ranks exchange all dense gradients once, whoever does it
        assert dense_mb < by_label[label]["sent_mb_per_step"] < 1.2 * dense_mb
    assert by_label[OURS]["sent_mb_per_step"] > dense_mb
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["p50_ms"] > 0.5 * dense_mb * 8 / 100 * 1e3, (
            "a link of 100 Mbit/s cannot be so quick"
        )
        assert row["peak_mb"] > 100
        assert (row["of_torchrec"] is None) == (PIPELINED not in by_label)
    assert by_label[topic.IDEAL]["of_ideal"] == 1.0
