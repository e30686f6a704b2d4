"""A run's folder."""

import json
import os

from pibroch.train.run_directory import LOCK, RunDirectory


def test_the_lock_is_its_owner_s_alone(tmp_path):
    """Whoever can read a file can lock it, and would keep the run from going on."""
    before = os.umask(0)
    try:
        run = RunDirectory(tmp_path / "run")
        run.claim()
    finally:
        os.umask(before)
    assert (run.path / LOCK).stat().st_mode & 0o777 == 0o600
    assert (run.path / LOCK).read_text().startswith(f"process {os.getpid()} on")


def written(run, records, end=""):
    run.metrics_path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)


def test_a_resumed_run_forgets_the_metrics_that_it_writes_again(tmp_path):
    run = RunDirectory(tmp_path / "new", rank=1)
    assert run.truncate_metrics(5) == 0, "there are none yet"
    assert run.metrics_path.parent.is_dir()
    run = RunDirectory(tmp_path)
    kept = [{"step": step, "seconds": step / 2} for step in range(1, 6)]
    kept += [{"step": 5, "kind": "window"}]
    test = [{"step": 5, "split": "test"}, {"step": 6, "seconds": 3.0}]
    for end in ("", '{"step": 6, "sec', '{"step": 5}'):
        written(run, [*kept, *test], end)
        assert run.truncate_metrics(5) == 2.5
        assert run.metrics() == kept
    assert run.truncate_metrics(0) == 0
    assert run.metrics() == []


def test_only_the_end_of_long_metrics_is_read(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    written(run, [{"step": step, "seconds": 1.0, "more": "x" * 100} for step in range(5000)])
    lines = []
    decode = json.loads
    monkeypatch.setattr(json, "loads", lambda line: lines.append(line) or decode(line))
    assert run.truncate_metrics(4989) == 1.0
    assert len(lines) == 11
