"""What topic ``lookahead`` does besides measuring.

Who meets whom, which rows they leave, what is said of them.
"""

import os

import numpy as np
import pytest
from benchmarks import oracle_speed
from benchmarks.hosts import IDEAL, Outcome
from benchmarks.lookahead_lineups import (
    ALLTOALL,
    LINEUPS,
    LOOKAHEAD,
    SHORTEST,
    TORCHREC,
    Entry,
    Setting,
    lineup_of,
    ours,
    settings,
)
from benchmarks.lookahead_sections import (
    BATCH,
    BREAKDOWN,
    DESIGN,
    HOSTS,
    LOSS,
    MODELS,
    ORACLE,
    SECTIONS,
    SKEW,
    STEP_TIME,
    TABLE_3,
)
from benchmarks.oracle_speed import OracleSetting
from benchmarks.registry import Options, find_topic
from benchmarks.results import table
from benchmarks.runner import Times
from benchmarks.topics import lookahead as topic
from benchmarks.workers.plain_models import PLAIN_MODELS
from benchmarks.workloads import Workload, drawn_batches

from pibroch.errors import ConfigError
from pibroch.models.build import MODELS as ALL_MODELS

SETTING = Setting(STEP_TIME, (ours(), Entry(IDEAL), Entry(ALLTOALL)))
COUNTED = {"critical_mb_per_step": 1.0}


def outcome(**milliseconds):
    times = {label: Times([[ms] * 3, [2 * ms] * 3], [1.0]) for label, ms in milliseconds.items()}
    return Outcome("200mbit", times, {label: (1.0, 2.0) for label in times})


def rows_of(setting, result, counted):
    return [
        topic.case_row(setting, entry, result, counted[entry.label]) for entry in setting.entries
    ]


def in_full(section):
    return settings(section, quick=False)


def test_every_section_has_its_line_ups():
    assert set(LINEUPS) == set(SECTIONS) - {ORACLE.name}
    for name in LINEUPS:
        assert {setting.section.name for setting in in_full(SECTIONS[name])} == {name}
    four = {LOOKAHEAD, TORCHREC, IDEAL, ALLTOALL}
    for section in (STEP_TIME, MODELS, BREAKDOWN, HOSTS, BATCH):
        assert all(
            {entry.contender for entry in setting.entries} == four for setting in in_full(section)
        )
    assert {(s.dim, rate) for s in in_full(STEP_TIME) if s.ids == "zipf" for rate in s.rates} == {
        (16, "1gbit"),
        (16, "200mbit"),
        (64, "1gbit"),
        (64, "200mbit"),
    }
    # peers have none with towers, and those of the zoo are not compared
    compared = {"dlrm", *PLAIN_MODELS}
    assert {s.model for section in (STEP_TIME, MODELS) for s in in_full(section)} == compared
    assert {s.hosts for s in in_full(HOSTS)} == {2, 4}
    assert {s.batch_size for s in in_full(BATCH)} == {512, 2048, 8192}
    assert [entry.lookahead for entry in in_full(TABLE_3)[0].entries] == [300, 200, 100, 50, 10, 5]
    assert {(s.ids, s.skew) for s in in_full(SKEW)} >= {
        ("hot", 0.01),
        ("hot", 0.9),
        ("zipf", 1.05),
        ("zipf", 5.0),
    }


def test_only_batch_sizes_are_measured_by_the_same_processes():
    (sizes,) = topic.groups(in_full(BATCH))
    both = topic.groups(in_full(HOSTS))
    assert [setting.batch_size for setting in sizes] == [512, 2048, 8192]
    assert [[setting.hosts for setting in group] for group in both] == [[2], [4]]


def test_fbgemm_can_hold_what_torchrec_trains():
    for section in (STEP_TIME, MODELS, BREAKDOWN, HOSTS, BATCH):
        assert all(ALL_MODELS[s.model].table_dim(s.dim) % 4 == 0 for s in in_full(section))


def test_batches_outlast_the_lookahead_and_quick_is_shorter():
    for name in LINEUPS:
        full = in_full(SECTIONS[name])
        (quick,) = settings(SECTIONS[name], quick=True)
        assert all(
            e.lookahead < s.num_batches
            for s in (*full, quick)
            for e in s.entries
            if s.ids != "criteo"
        )
        assert max(entry.lookahead for entry in quick.entries) <= SHORTEST
        assert quick.entries
        assert len(quick.rates) == 1
    assert len(oracle_speed.settings(quick=True)) < len(oracle_speed.settings(quick=False))


def test_sections_are_chosen_by_name():
    existing = find_topic("lookahead")
    assert existing.chosen((), quick=False) == tuple(SECTIONS)
    assert existing.chosen((), quick=True) == (STEP_TIME.name, ORACLE.name)
    assert existing.chosen(("loss", "hosts"), quick=True) == ("hosts", "loss")
    with pytest.raises(ConfigError, match=r"'los'.*step_time"):
        existing.chosen(("los",), quick=False)
    with pytest.raises(ConfigError, match="no sections"):
        find_topic("kernels").chosen(("loss",), quick=False)


def test_entries_of_a_line_up_differ_and_keep_their_order():
    for setting in (setting for name in LINEUPS for setting in in_full(SECTIONS[name])):
        labels = [spec.label for spec in lineup_of(setting).specs]
        expected = [entry.label for entry in setting.entries]
        assert len(set(expected)) == len(expected)
        assert labels == [label for label in expected if label in labels]
        assert labels[0] == expected[0], "what others are compared with runs always"


def test_a_case_has_the_entrys_options_and_tables_as_wide_as_the_model_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(Workload, "write", lambda self, folder: folder / f"{self.batch_size}.npz")
    options = Options(True, tmp_path, print)
    entry = ours("replicated", cache="replicated")
    case = topic.case_for(entry, Setting(MODELS, (entry,), model="deepfm"), options)
    assert (case.dim, case.model, case.batch_size, case.reports_parts) == (
        17,
        "deepfm",
        2048,
        False,
    )
    assert case.exchange_options == {"lookahead": 200, "cache": "replicated"}
    assert topic.case_for(Entry(IDEAL), SETTING, options).exchange_options == {}
    wide = topic.case_for(entry, Setting(BREAKDOWN, (entry,), hosts=4, batch_size=512), options)
    assert (wide.batch_size, wide.data, wide.reports_parts) == (
        512,
        str(tmp_path / "2048.npz"),
        True,
    )


def test_workloads_of_different_skew_have_different_files_and_ids(tmp_path):
    flat, steep = (Workload("zipf", 2, 200, 2, 1000, skew) for skew in (0.0, 5.0))
    assert flat.write(tmp_path) != steep.write(tmp_path)
    most_often = [
        np.bincount(drawn_batches(workload).ids.ravel()).max() / 800 for workload in (flat, steep)
    ]
    assert most_often[0] < 0.02
    assert most_often[1] > 0.9


def test_hot_ids_are_as_hot_as_they_should_be(tmp_path):
    ids = drawn_batches(Workload("hot", 2, 2000, 1, 1000, 0.4)).ids.ravel()
    rows, counts = np.unique(ids, return_counts=True)
    assert rows.min() >= 0
    assert rows.max() < 1000
    assert abs(np.sort(counts)[-10:].sum() / len(ids) - 0.4) < 0.05
    hot = Workload("hot", 2, 200, 2, 1000, 0.4)
    none = Workload("hot", 2, 200, 2, 1000, 0.01)
    assert hot.write(tmp_path) != none.write(tmp_path)


def test_a_row_says_what_it_is_of():
    setting = Setting(HOSTS, (ours(), Entry(ALLTOALL)), hosts=4, batch_size=512)
    ours_row, other = rows_of(
        setting, outcome(lookahead=10.0, alltoall=25.0), {LOOKAHEAD: COUNTED, ALLTOALL: {}}
    )
    assert (ours_row["hosts"], ours_row["batch"], ours_row["group"]) == (4, 512, "4 hosts")
    assert ours_row["samples_per_second"] == pytest.approx(4 * 512 / ours_row["p50_ms"] * 1e3)
    assert (ours_row["of_lookahead"], other["of_lookahead"]) == (1.0, 2.5)
    assert (ours_row["lookahead"], other["lookahead"]) == (200, None)


def test_what_a_section_shows_is_said():
    names = ("lrpp", "partitioned", "replicated", "replicated, not delayed")
    designs = Setting(DESIGN, tuple(ours(name) for name in names))
    values = dict(
        zip((entry.label for entry in designs.entries), (1.0, 2.0, 3.0, 4.0), strict=True)
    )
    counted = {label: {"critical_mb_per_step": value} for label, value in values.items()}
    (line,) = topic.summary(DESIGN, rows_of(designs, outcome(**values), counted))
    assert "75% (lrpp), 50% (partitioned), 25% (replicated)" in line
    rows = []
    for skew, ms in ((0.0, 12.0), (5.0, 10.0)):
        setting = Setting(SKEW, (ours(), Entry(IDEAL)), skew=skew)
        rows += rows_of(
            setting, outcome(lookahead=ms, ideal=1.0), {"lookahead": COUNTED, IDEAL: {}}
        )
    assert "1.20x the quickest" in topic.summary(SKEW, rows)[0]
    (line,) = topic.summary(
        ORACLE, oracle_speed.rows_of(OracleSetting(2048), Times([[2.0] * 3], []))
    )
    assert "1.02 to 1.02 million samples/s" in line
    assert topic.summary(LOSS, []) == []


def test_a_headline_compares_with_whoever_ran():
    line = topic.headline(SETTING, outcome(lookahead=60.0, ideal=50.0, alltoall=120.0))
    assert "lookahead takes 1.20x (1.20 to 1.20) the ideal's, 0.50x alltoall's" in line
    assert "TorchRec" not in line


def test_the_oracles_section_is_measured_without_a_lab(tmp_path, monkeypatch):
    monkeypatch.setattr(
        oracle_speed, "settings", lambda quick: [OracleSetting(64, features=26, lookahead=4)]
    )
    report = topic.run(Options(True, tmp_path, lambda text: None, section="oracle"))
    assert report.title == ORACLE.title
    assert report.notes[0] == f"how: {ORACLE.how}"
    assert report.notes[1].startswith("quick")
    assert table(report).startswith("| batch | features | contender | lookahead |")
    report.plot.draw(report.rows, report.title, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_oracle_is_timed_on_one_core():
    before = os.sched_getaffinity(0)
    with oracle_speed.on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
        times = oracle_speed.speed(OracleSetting(64, features=3, lookahead=4), steps=10)
    assert os.sched_getaffinity(0) == before
    (steps_ms,) = times.rounds_ms
    assert len(steps_ms) == 10
    assert min(steps_ms) > 0


@pytest.mark.parametrize("setting", oracle_speed.settings(quick=True))
def test_the_oracles_batches_outlast_its_window(setting):
    small = OracleSetting(16, setting.features, setting.lookahead)
    batches = oracle_speed.drawn(small)
    assert len(batches) > setting.lookahead + 1
    assert batches[0].shape == (setting.features, 16)
    assert not np.array_equal(batches[0], batches[1])
