"""What topic ``lookahead`` does besides measuring: who meets whom, which rows they leave, what is said of them."""

import os

import numpy as np
import pytest
from benchmarks import oracle_speed
from benchmarks.hosts import IDEAL, Outcome
from benchmarks.lookahead_lineups import (
    ALLTOALL,
    DELAY,
    DESIGN,
    MODELS,
    SKEW,
    STEP_TIME,
    TABLE_3,
    Entry,
    Setting,
    lineup_of,
    ours,
    settings,
)  # fmt: skip
from benchmarks.oracle_speed import OracleSetting
from benchmarks.plots import draw
from benchmarks.registry import Options
from benchmarks.results import Report, table
from benchmarks.runner import Times
from benchmarks.topics import lookahead as topic
from benchmarks.workloads import Workload, drawn_batches

SETTING = Setting(STEP_TIME, (ours(), Entry(IDEAL), Entry(ALLTOALL)))
COUNTED = {"critical_mb_per_step": 1.0}


def outcome(**milliseconds):
    times = {label: Times([[ms] * 3, [2 * ms] * 3], [1.0]) for label, ms in milliseconds.items()}
    return Outcome("200mbit", times, {label: (1.0, 2.0) for label in times})


def rows_of(setting, result, counted):
    return [row for entry in setting.entries for row in topic.case_rows(setting, entry, result, counted[entry.label])]


def test_every_section_is_measured():
    full = settings(quick=False)
    sections = {section for s in full for entry in s.entries for section in entry.sections or (s.section,)}
    assert sections == {STEP_TIME, DESIGN, DELAY, TABLE_3, SKEW, MODELS}
    assert {(s.dim, rate) for s in full if (s.section, s.ids) == (STEP_TIME, "zipf") for rate in s.rates} == {
        (16, "1gbit"), (16, "200mbit"), (64, "1gbit"), (64, "200mbit"),
    }  # fmt: skip
    (quick,) = settings(quick=True)
    assert all(entry.lookahead < s.num_batches for s in (*full, quick) for entry in s.entries if s.ids != "criteo")
    assert len(oracle_speed.settings(quick=True)) < len(oracle_speed.settings(quick=False))


def test_entries_of_a_line_up_differ_and_keep_their_order():
    for setting in settings(quick=False):
        labels = [spec.label for spec in lineup_of(setting).specs]
        expected = [entry.label for entry in setting.entries]
        assert len(set(expected)) == len(expected)
        assert labels == [label for label in expected if label in labels]
        assert labels[0] == expected[0], "what others are compared with runs always"


def test_a_case_has_the_entrys_options_and_tables_as_wide_as_the_model_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(Workload, "write", lambda self, folder: folder / "batches.npz")
    options = Options(True, tmp_path, print)
    entry = ours("replicated", cache="replicated")
    case = topic.case_for(entry, Setting(MODELS, (entry,), model="deepfm"), options)
    assert (case.dim, case.model, case.batch_size) == (17, "deepfm", 2048)
    assert case.exchange_options == {"lookahead": 200, "cache": "replicated"}
    assert topic.case_for(Entry(IDEAL), SETTING, options).exchange_options == {}


def test_workloads_of_different_skew_have_different_files_and_ids(tmp_path):
    flat, steep = (Workload("zipf", 2, 200, 2, 1000, skew) for skew in (0.0, 5.0))
    assert flat.write(tmp_path) != steep.write(tmp_path)
    most_often = [np.bincount(drawn_batches(workload).ids.ravel()).max() / 800 for workload in (flat, steep)]
    assert most_often[0] < 0.02
    assert most_often[1] > 0.9


def test_an_entry_leaves_a_row_in_each_of_its_sections():
    setting = Setting(DESIGN, (ours("lrpp", (DESIGN, DELAY)), ours("replicated"), ours("not delayed", (DELAY,))))
    labels = [entry.label for entry in setting.entries]
    counted = [{"critical_mb_per_step": value} for value in (1.0, 4.0, 2.0)]
    rows = rows_of(
        setting, outcome(**dict.fromkeys(labels, 10.0) | {labels[1]: 25.0}), dict(zip(labels, counted, strict=True))
    )
    assert [(row["section"], row["variant"]) for row in rows] == [
        (DESIGN, "lrpp"), (DELAY, "lrpp"), (DESIGN, "replicated"), (DELAY, "not delayed"),
    ]  # fmt: skip
    assert [row["of_lookahead"] for row in rows] == [1.0, 1.0, 2.5, 1.0]


def test_what_the_sections_show_is_said():
    names = ("lrpp", "partitioned", "replicated", "replicated, not delayed")
    designs = Setting(DESIGN, tuple(ours(name) for name in names))
    values = dict(zip((entry.label for entry in designs.entries), (1.0, 2.0, 3.0, 4.0), strict=True))
    counted = {label: {"critical_mb_per_step": value} for label, value in values.items()}
    rows = rows_of(designs, outcome(**values), counted)
    for skew, ms in ((0.0, 12.0), (5.0, 10.0)):
        setting = Setting(SKEW, (ours(), Entry(IDEAL)), skew=skew)
        rows += rows_of(setting, outcome(lookahead=ms, ideal=1.0), {"lookahead": COUNTED, IDEAL: {}})
    rows += oracle_speed.rows_of(OracleSetting(2048), Times([[2.0] * 3], []))
    found = "\n".join(topic.findings(rows))
    assert "75% (lrpp), 50% (partitioned), 25% (replicated)" in found
    assert "1.20x the quickest" in found
    assert "1.02 to 1.02 million samples/s" in found


def test_a_headline_compares_with_whoever_ran():
    line = topic.headline(SETTING, outcome(lookahead=60.0, ideal=50.0, alltoall=120.0))
    assert "lookahead takes 1.20x (1.20 to 1.20) the ideal's, 0.50x alltoall's" in line
    assert "TorchRec" not in line


def test_each_section_has_a_table_and_a_panel(tmp_path):
    rows = rows_of(
        SETTING, outcome(lookahead=60.0, ideal=50.0, alltoall=120.0), {"lookahead": {}, IDEAL: {}, ALLTOALL: {}}
    )
    rows += oracle_speed.rows_of(OracleSetting(2048), Times([[2.0] * 3], []))
    page = table(Report("t", "T", rows, topic.COLUMNS, topic.PLOT, table_by="section"))
    first, second = page.split("## oracle")
    assert first.startswith(f"## {STEP_TIME}\n\n| model | ids |")
    assert "of_ideal" in first
    assert "of_ideal" not in second
    assert "features" in second
    draw(topic.PLOT, rows, "T", tmp_path / "plot.png")
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
