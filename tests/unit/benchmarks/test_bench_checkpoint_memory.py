"""The topic ``checkpoint_memory``: tables of some thousand rows, saved by two ranks."""

import pytest
from benchmarks.contender import BenchmarkError
from benchmarks.registry import Options
from benchmarks.topics import checkpoint_memory


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_memory, "QUICK_SCALE", 0.001)
    monkeypatch.setattr(checkpoint_memory, "RANKS", ((2, 1),))
    return Options(quick=True, scratch=tmp_path, say=lambda text: None)


def test_each_process_has_a_row(options):
    report = checkpoint_memory.run(options)
    assert [(row["phase"], row["rank"]) for row in report.rows] == [
        ("save", 0),
        ("save", 1),
        ("load", 0),
    ]
    assert all(row["saved_by"] == 2 and row["loaded_by"] == 1 for row in report.rows)
    assert all(0 < row["above_before_gib"] <= row["above_gib"] < 1 for row in report.rows)
    assert [name for name in report.columns if name not in report.rows[0]] == ["load_s"]


def test_too_much_memory_is_an_error(options, monkeypatch):
    figures = {"phase": "save", "rank": 0, "above_gib": 1.01}
    monkeypatch.setattr(checkpoint_memory, "run_phase", lambda *arguments: [dict(figures)])
    with pytest.raises(BenchmarkError, match=r"1\.01 GiB above its tables, 1 GiB is allowed"):
        checkpoint_memory.run(options)
