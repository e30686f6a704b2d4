"""Windows of event time as each listener shows them, and a run's figures over HTTP."""

import json
import logging
import re
import urllib.error
import urllib.request

import pytest

from pibroch.errors import ConfigError
from pibroch.observability.exposition import Exposition
from pibroch.observability.progress import LoggedProgress, window_line
from pibroch.observability.records import (
    EvaluationRecord,
    TrainingRecord,
    WindowRecord,
    shown_time,
)
from pibroch.observability.sinks import JsonLines

FIGURES = {
    "auc": 0.75,
    "logloss": 0.5,
    "normalized_entropy": 0.9,
    "calibration": 1.25,
    "num_samples": 4000,
}
WINDOW = WindowRecord(
    step=9,
    begin_ms=1_700_000_000_000,
    end_ms=1_700_000_060_000,
    num_late=3,
    alarms=("calibration 1.2500, outside 0.9 to 1.1",),
    tasks={'a "click"': FIGURES},
    num_samples=4000,
    auc=0.75,
    logloss=0.5,
    normalized_entropy=0.9,
    calibration=1.25,
)


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def test_a_run_answers_with_its_newest_figures():
    sink = Exposition("127.0.0.1:0")
    try:
        assert get(sink.url) == (
            "# TYPE pibroch_run_alarms_total counter\npibroch_run_alarms_total 0\n"
        )
        sink.training(
            TrainingRecord(8, 0, 0.5, 1e4, 0.01, 1.0, 3 << 20, event_time=1_700_000_000_123)
        )
        sink.training(
            TrainingRecord(9, 0, 0.4, 1e4, 0.01, 1.0, 3 << 20, event_time=1_700_000_000_456)
        )
        sink.evaluation(
            EvaluationRecord(9, "validation", 0.7, 0.5, 0.9, 1.0, 10, True, {"y": FIGURES})
        )
        sink.window(WINDOW)
        sink.window(WINDOW)
        text = get(sink.url)
        for line in (
            "pibroch_run_step 9",
            "pibroch_run_loss 0.4",
            "pibroch_run_event_time 1700000000456",
            'pibroch_run_evaluation_auc{split="validation",label="y"} 0.75',
            r'pibroch_run_window_calibration{label="a \"click\""} 1.25',
            "pibroch_run_window_end_ms 1700000060000",
            "pibroch_run_late_total 3",
            "pibroch_run_alarms_total 2",
        ):
            assert f"\n{line}\n" in text, line
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert all(
            re.fullmatch(r'\w+(\{(\w+="(\\.|[^"\\])*",?)+\})? [0-9.e+-]+', line) for line in lines
        )
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(sink.url.replace("/metrics", "/"))
        with pytest.raises(ConfigError, match="in use"):
            Exposition(sink.url.removeprefix("http://").removesuffix("/metrics"))
    finally:
        sink.close()
    for address in ("nowhere", "127.0.0.1:99999", "127.0.0.1:x"):
        with pytest.raises(ConfigError, match="--metrics-address"):
            Exposition(address)


def test_a_window_is_a_line_and_an_alarm_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "pibroch"):
        LoggedProgress(10).window(WINDOW)
    line, alarm = [record.getMessage() for record in caplog.records]
    assert line == window_line(WINDOW) and "calibration 1.250  4,000 samples  3 late so far" in line
    assert shown_time(WINDOW.begin_ms) in line
    assert alarm.startswith(
        "alarm at step 9: calibration 1.2500, outside 0.9 to 1.1, in the window"
    )
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.window(WINDOW)
    sink.close()
    record = json.loads((tmp_path / "m.jsonl").read_text())
    assert record["kind"] == "window" and record["tasks"]['a "click"'] == FIGURES
    assert record["alarms"] == list(WINDOW.alarms)
