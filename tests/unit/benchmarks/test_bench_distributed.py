"""Topic ``distributed`` besides measuring: its settings, batches and ratios."""

from itertools import islice, product

import pytest
import torch
from benchmarks.cases import CHECK_STEPS, Arrays, Case
from benchmarks.comparison import OURS
from benchmarks.hosts import TORCHREC_FORMS, link_mb, loopback_mb
from benchmarks.lab import LinkBytes
from benchmarks.runner import Times
from benchmarks.team import Carried
from benchmarks.topics import distributed as topic
from benchmarks.workers.ranks import batch_order, rank_batches
from benchmarks.workloads import Workload, sample_path

SETTING = topic.Setting("zipf", 4, 64)
PIPELINED, DMP = TORCHREC_FORMS


def outcome(**milliseconds):
    """Two rounds of three steps each; the second round takes twice as long for all."""
    times = {
        label.replace("_", " "): Times([[ms] * 3, [2 * ms] * 3], [1.0])
        for label, ms in milliseconds.items()
    }
    return topic.Outcome("200mbit", times, {label: (1.0, 2.0) for label in times})


def rows_of(result):
    rows = topic.case_rows(SETTING, result, dict.fromkeys(result.times, 500_000_000))
    return {row["contender"]: row for row in rows}


def test_everything_that_the_table_promises_is_measured():
    kinds = ("zipf", "criteo") if sample_path() else ("zipf",)
    full = topic.settings(quick=False)
    cells = {(s.ids, s.hosts, s.dim, rate) for s in full for rate in s.rates}
    assert cells == set(product(kinds, (2, 4), (16, 64), ("1gbit", "200mbit")))
    (quick,) = topic.settings(quick=True)
    assert {(quick.ids, quick.hosts, quick.dim, rate) for rate in quick.rates} < cells


def test_ours_comes_first_and_a_slow_one_next():
    labels = [
        spec.label for spec in topic.lineup_of(topic.Setting("zipf", 2, 16, all_forms=True)).specs
    ]
    assert labels[0] == OURS
    assert labels[-2:] == list(topic.IDEAL_FORMS)
    assert len(topic.lineup_of(SETTING).specs) < len(labels)


def test_checked_batches_come_twice():
    order = list(islice(batch_order(4), 12))
    assert order[:CHECK_STEPS] == [0, 0, 1, 1, 2, 2]
    assert order[CHECK_STEPS:] == [2, 3, 0, 1, 2, 3]


def test_ranks_divide_the_global_batches(tmp_path, monkeypatch):
    path = Workload("zipf", num_batches=3, batch_size=8, num_tables=2, num_rows=50).write(tmp_path)
    case = Case(str(path), 4, batch_size=4, num_tables=2, num_rows=50)
    parts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        parts.append(rank_batches(case))
    whole = Arrays.load(path)
    for place, (expected, axis) in enumerate(((whole.ids, 2), (whole.dense, 1), (whole.labels, 1))):
        together = torch.cat([part[place] for part in parts], axis)
        assert torch.equal(together, torch.from_numpy(expected))


def test_the_faster_form_of_torchrec_counts():
    result = outcome(pibroch=60.0, TorchRec_pipelined=100.0, TorchRec_DMP=80.0, ideal=40.0)
    assert result.torchrec == DMP
    rows = rows_of(result)
    assert rows[OURS]["of_torchrec"] == rows[OURS]["of_torchrec_most"] == 0.75
    assert rows[OURS]["of_ideal"] == 1.5
    assert rows[PIPELINED]["of_torchrec"] == 1.25
    assert rows[OURS]["samples_per_second"] == pytest.approx(4 * 2048 / 0.090)
    line = topic.headline(SETTING, result)
    assert "zipf ids, 4 hosts, dim 64, 200mbit: pibroch takes 0.75x" in line
    assert "TorchRec DMP" in line


def test_without_torchrec_there_is_no_ratio_to_it():
    result = outcome(pibroch=60.0, ideal=40.0)
    assert rows_of(result)[OURS]["of_torchrec"] is None
    assert topic.headline(SETTING, result).endswith(
        "pibroch takes 1.50x (1.50 to 1.50) the ideal's**"
    )


def test_bytes_are_those_of_a_step_on_the_mean_and_on_the_worst_link():
    carried = (
        Carried(
            10,
            (LinkBytes(30_000_000, 10_000_000), LinkBytes(10_000_000, 30_000_000)),
            (22_000_000, 0),
        ),
        Carried(
            1, (LinkBytes(3_000_000, 1_000_000), LinkBytes(1_000_000, 14_000_000)), (0, 11_000_000)
        ),
    )
    assert loopback_mb(carried) == pytest.approx(1.5)
    assert link_mb(carried) == (pytest.approx(2.0), pytest.approx(4.0))
