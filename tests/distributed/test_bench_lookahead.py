"""A line-up of topic ``lookahead`` on real hosts of a lab, small enough for a test."""

from dataclasses import replace

import pytest
from benchmarks.breakdown import DENSE, DENSE_WAIT, LOOKUP, UPDATE, parts_ms
from benchmarks.cases import Case
from benchmarks.hosts import IDEAL, measure_at
from benchmarks.lab import Lab, obstacle
from benchmarks.lookahead_lineups import (
    ALLTOALL,
    LOOKAHEAD,
    TORCHREC,
    Entry,
    Setting,
    lineup_of,
    ours,
)
from benchmarks.lookahead_sections import MODELS
from benchmarks.loss_curves import check_equal, train_in_turns
from benchmarks.runner import Schedule
from benchmarks.team import teams
from benchmarks.topics import lookahead as topic
from benchmarks.workloads import Workload

HINDRANCE = obstacle()
pytestmark = [
    pytest.mark.alone,  # a lab
    pytest.mark.skipif(HINDRANCE is not None, reason=f"no lab here: {HINDRANCE}"),
]

SHORT = Schedule(rounds=1, steps_per_round=10, warmup_steps=1, pause_s=0.2)
ENTRIES = (ours(lookahead=3), Entry(TORCHREC), Entry(IDEAL), Entry(ALLTOALL))
SETTING = Setting(MODELS, ENTRIES, dim=7, model="deepfm", num_batches=8, batch_size=32)


@pytest.fixture
def case(tmp_path):
    """Tables for embeddings of dim 7 and a first-order weight; eight global batches.

    Three tables, batches of 2 x 32.

    Of so many rows that TorchRec's planner does not replicate them.
    """
    path = Workload("zipf", num_batches=8, batch_size=64, num_tables=3, num_rows=20_000).write(
        tmp_path
    )
    return Case(
        str(path),
        8,
        32,
        3,
        20_000,
        sparse_optimizer="rowwise_adagrad",
        threads=1,
        model="deepfm",
        reports_parts=True,
    )


@pytest.mark.slow
def test_a_line_up_is_checked_and_measured(case):
    with Lab(SETTING.hosts) as lab, teams(lineup_of(SETTING).specs, lab) as running:
        for team in running:
            team.setup(replace(case, exchange_options=topic.entry_of(SETTING, team).options))
        (agreement,) = topic.check(running)
        assert {LOOKAHEAD, ALLTOALL} <= set(agreement.contenders)
        assert agreement.largest["loss"] < 1e-5
        topic.warm_up(SETTING, running)
        before = {team.spec.label: team.counts() for team in running}
        outcome = measure_at("100mbit", lab, running, SHORT)
        counted = {
            team.spec.label: topic.figures_of_exchange(before[team.spec.label], team, SETTING)
            for team in running
        }
        check_losses([team for team in running if team.spec.label in (LOOKAHEAD, ALLTOALL)])
    labels = [entry.label for entry in ENTRIES if entry.label in outcome.times]
    rows = {
        entry.label: topic.case_row(SETTING, entry, outcome, counted[entry.label])
        for entry in ENTRIES
        if entry.label in labels
    }
    for row in rows.values():
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["group"] == "deepfm"
    check_counts(rows[LOOKAHEAD])
    assert set(counted[IDEAL]) == {"peak_mb"}, "there is nothing to count"
    for label in labels:
        check_parts(label, outcome.times[label])


def check_losses(running):
    """``lookahead`` alone was warmed up; from where it stands both go on alike."""
    running[1].run("step", 0, ENTRIES[0].lookahead)
    curves = train_in_turns(running, 2, lambda text: None)
    check_equal(curves)
    assert len(set(curves[LOOKAHEAD][0])) == 20, "losses differ from step to step"
    assert all(ms > 0 for ms in curves[ALLTOALL][1])


def check_parts(label, times):
    result = {part: values.mean() for part, values in parts_ms(times).items()}
    assert result[DENSE] > 0
    assert result[DENSE_WAIT] > 0
    assert (result[LOOKUP] > 0) == (result[UPDATE] > 0) == (label != IDEAL)
    assert sum(result.values()) == pytest.approx(sum(times.rounds_ms[0]) / 10)


def check_counts(row):
    by_purpose = {purpose: row[f"{purpose}_mb_per_step"] for purpose in topic.PURPOSES}
    assert all(value > 0 for value in by_purpose.values()), by_purpose
    assert sum(by_purpose.values()) < row["sent_mb_per_step"], (
        "the link carries dense gradients and headers as well"
    )
    assert 0 < row["prefetched_rows"] <= row["fetched_rows"] <= row["read_rows"] < 3 * 32
    assert 0 < row["slots"] < 3 * 20_000
