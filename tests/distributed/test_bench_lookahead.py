"""A line-up of topic ``lookahead`` on real hosts of a lab, small enough for a test."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from benchmarks.cases import Case  # noqa: E402
from benchmarks.hosts import IDEAL, measure_at  # noqa: E402
from benchmarks.lab import Lab, obstacle  # noqa: E402
from benchmarks.lookahead_lineups import ALLTOALL, LOOKAHEAD, MODELS, Entry, Setting, lineup_of, ours  # noqa: E402
from benchmarks.runner import Schedule  # noqa: E402
from benchmarks.team import teams  # noqa: E402
from benchmarks.topics import lookahead as topic  # noqa: E402
from benchmarks.workloads import Workload  # noqa: E402

HINDRANCE = obstacle()
pytestmark = pytest.mark.skipif(HINDRANCE is not None, reason=f"no lab here: {HINDRANCE}")

SHORT = Schedule(rounds=1, steps_per_round=10, warmup_steps=1, pause_s=0.2)
ENTRIES = (ours(lookahead=3), Entry(IDEAL), Entry(ALLTOALL))
SETTING = Setting(MODELS, ENTRIES, dim=4, model="deepfm", num_batches=8)


@pytest.fixture
def case(tmp_path):
    """Three tables for embeddings of dim 4 and a first-order weight, eight global batches of 2 x 32."""
    path = Workload("zipf", num_batches=8, batch_size=64, num_tables=3, num_rows=2000).write(tmp_path)
    return Case(str(path), 5, 32, 3, 2000, sparse_optimizer="rowwise_adagrad", threads=1, model="deepfm")


@pytest.mark.slow
def test_a_line_up_is_checked_and_measured(case):
    with Lab(topic.HOSTS) as lab, teams(lineup_of(SETTING).specs, lab) as running:
        for team in running:
            team.setup(replace(case, exchange_options=topic.entry_of(SETTING, team).options))
        (agreement,) = topic.check(running)
        assert agreement.contenders == (LOOKAHEAD, ALLTOALL)
        assert agreement.largest["loss"] == 0.0, "the same bits"
        topic.warm_up(SETTING, running)
        before = {team.spec.label: team.counts() for team in running}
        outcome = measure_at("100mbit", lab, running, SHORT)
        counted = {
            team.spec.label: topic.figures_of_exchange(before[team.spec.label], team, SETTING) for team in running
        }
    rows = [row for entry in ENTRIES for row in topic.case_rows(SETTING, entry, outcome, counted[entry.label])]
    assert [row["contender"] for row in rows] == [LOOKAHEAD, IDEAL, ALLTOALL]
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["group"] == "deepfm"
    check_counts(rows[0])
    assert set(counted[IDEAL]) == {"peak_mb"}, "there is nothing to count"


def check_counts(row):
    by_purpose = {purpose: row[f"{purpose}_mb_per_step"] for purpose in topic.PURPOSES}
    assert all(value > 0 for value in by_purpose.values()), by_purpose
    assert sum(by_purpose.values()) < row["sent_mb_per_step"], "the link carries dense gradients and headers as well"
    assert 0 < row["prefetched_rows"] <= row["fetched_rows"] <= row["read_rows"] < 3 * 32
    assert 0 < row["slots"] < 3 * 2000
