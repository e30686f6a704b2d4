import io
import json
import logging
import resource
import sys
import time
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from pibroch.errors import MissingDependencyError
from pibroch.observability import sinks
from pibroch.observability.notice import notice_when_slow
from pibroch.observability.progress import LoggedProgress, TerminalProgress, progress_sink
from pibroch.observability.records import EvaluationRecord, FanOut, RawIdsRecord, TrainingRecord
from pibroch.observability.sinks import JsonLines, TensorBoard

# TensorBoard's own thread ends when its disk is full, perhaps during the next test
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def training(step):
    return TrainingRecord(step, 0, 0.5, 12_345.0, 0.01, step / 10, 3 << 20)


EVALUATION = EvaluationRecord(20, "validation", 0.75, None, 0.9, 1.01, 100, True)


def test_json_lines_append(tmp_path):
    for step in (1, 2):
        sink = JsonLines(tmp_path / "m.jsonl")
        sink.training(training(step))
        sink.evaluation(EVALUATION)
        sink.close()
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["training", "evaluation"] * 2
    assert records[2]["step"] == 2 and records[1]["logloss"] is None


def warnings(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_that_a_full_disk_refuses_wait_for_room(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = JsonLines(path)
    sink.training(training(1))
    with caplog.at_level(logging.INFO, "pibroch"):
        try:  # a part of the second line finds room
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
            for step in range(2, 50):
                sink.training(training(step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_text().count("\n") == 1
        sink.training(training(50))
        assert steps_in(path) == list(range(1, 51))
        sink.close()
    message = f"File too large while writing {path}: the run goes on, and its lines wait for room"
    assert warnings(caplog) == [message]
    assert warnings(caplog, logging.INFO) == [f"{path} is written again"]


def test_lines_that_are_lost_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "MOST_WAITING_LINES", 10)
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    sink = JsonLines(tmp_path / "m.jsonl")
    for step in range(30):
        sink.training(training(step))
    assert len(sink._waiting) == 10
    sink.close()
    first, last = warnings(caplog)
    assert first.startswith("No space left on device") and last.startswith("30 lines of")


def test_without_a_disk_for_tensorboard_the_run_goes_on(tmp_path, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = TensorBoard(tmp_path / "events")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        for step in range(3000):  # more than its thread keeps back
            sink.training(training(step))
        sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first, last = warnings(caplog)
    assert first.startswith("File too large") and last.endswith("values for TensorBoard are lost")


def test_tensorboard_writes_events_or_says_what_is_missing(tmp_path, monkeypatch):
    sink = TensorBoard(tmp_path / "events")
    sink.training(training(1))
    sink.evaluation(EVALUATION)
    sink.close()
    assert next((tmp_path / "events").glob("events*")).stat().st_size > 100
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pibroch\[tensorboard\]'"):
        TensorBoard(tmp_path / "none")


def test_a_terminal_sees_one_moving_line():
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    sink = progress_sink(console, total_steps=40)
    assert isinstance(sink, TerminalProgress)
    sink.training(training(20))
    sink.evaluation(EVALUATION)
    sink.training(training(30))
    sink.close()
    text = console.file.getvalue()
    assert "validation: AUC 0.7500  logloss undefined" in text and "best so far" in text
    assert (
        "30/40" in text and "loss 0.5000" in text and "12,345 samples/s" in text and "3 MiB" in text
    )


def test_anything_else_gets_lines_now_and_then(caplog):
    sink = progress_sink(Console(file=io.StringIO()), total_steps=40)
    assert isinstance(sink, LoggedProgress)
    with caplog.at_level(logging.INFO, "pibroch"):
        for step in range(1, 6):
            sink.training(replace(training(step), waiting_seconds=1.24))
        FanOut([sink]).evaluation(EVALUATION)
    assert [record.message.split()[1] for record in caplog.records] == ["1/40", "20"]
    assert "samples/s  waiting 1.2 s  memory" in caplog.records[0].message
    line = caplog.records[0].message
    with caplog.at_level(logging.INFO, "pibroch"):
        progress_sink(Console(file=io.StringIO()), 40).training(
            replace(training(1), cache_hit_rate=0.925, lookahead=200)
        )
    assert (
        "hits" not in line
        and "samples/s  hits 92.5%  lookahead 200  memory" in caplog.records[-1].message
    )


RAW_IDS = {
    "user": RawIdsRecord(100, 80, 3, lookups=40, hits=30, admissions=9, evictions=4, expiries=1),
    "item": RawIdsRecord(100, 20, lookups=60, hits=60),
}


def test_tables_of_raw_ids_together_in_the_line_and_one_by_one_elsewhere(tmp_path, caplog):
    record = replace(training(1), raw_ids=RAW_IDS)
    with caplog.at_level(logging.INFO, "pibroch"):
        progress_sink(Console(file=io.StringIO()), 40).training(record)
    figures = "samples/s  rows used 50.0%  ids with rows 90.0%  ids lost 5  memory"
    assert figures in caplog.records[0].message
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.training(record)
    sink.close()
    written = json.loads((tmp_path / "m.jsonl").read_text())["raw_ids"]
    assert written == {name: asdict(each) for name, each in RAW_IDS.items()}
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "board")
    board.training(record)
    board.close()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (fill,) = events.Scalars("raw_ids/user/fill")
    (hit_rate,) = events.Scalars("raw_ids/item/hit_rate")
    assert (fill.step, round(fill.value, 6), hit_rate.value) == (1, 0.8, 1.0)


def test_counters_between_two_times():
    before = {"capacity": 9, "used": 2, "lookups": 5, "hits": 1, "steps": 1}
    now = {"capacity": 9, "used": 4, "lookups": 9, "hits": 4, "steps": 3, "evictions": 2}
    record = RawIdsRecord.between(before, now)
    assert record == RawIdsRecord(9, 4, lookups=4, hits=3, evictions=2)
    assert (record.fill, record.hit_rate) == (4 / 9, 0.75)
    assert RawIdsRecord().hit_rate is None and RawIdsRecord().fill == 0


def test_a_notice_only_when_slow(caplog):
    logger = logging.getLogger("pibroch.test")
    with caplog.at_level(logging.INFO, "pibroch"):
        with notice_when_slow(logger, "quick", after_seconds=60):
            pass
        with notice_when_slow(logger, "slow", after_seconds=0.0):
            deadline = time.monotonic() + 60
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
    assert [record.message for record in caplog.records] == ["slow"]
