"""Windows of event time as each listener shows them, and a run's figures over HTTP."""

import json
import logging
import os
import resource
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
        assert "\npibroch_run_alarms_total 0.0\n" in get(sink.url)
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
        families = {
            sample.name: (sample.labels, sample.value)
            for family in text_string_to_metric_families(get(sink.url))
            for sample in family.samples
        }
        assert families["pibroch_run_step"] == ({}, 9)
        assert families["pibroch_run_loss"] == ({}, 0.4)
        assert families["pibroch_run_event_time"] == ({}, 1_700_000_000_456)
        labels = {"split": "validation", "label": "y"}
        assert families["pibroch_run_evaluation_auc"] == (labels, 0.75)
        assert families["pibroch_run_window_calibration"] == ({"label": 'a "click"'}, 1.25)
        assert families["pibroch_run_window_end_ms"] == ({}, 1_700_000_060_000)
        assert families["pibroch_run_late_total"] == ({}, 3)
        assert families["pibroch_run_alarms_total"] == ({}, 2)
        undefined = replace(WINDOW, tasks={"y": {**FIGURES, "auc": None}})
        sink.window(undefined)
        text = get(sink.url)
        assert "window_auc" not in text and "pibroch_run_window_logloss" in text
        with pytest.raises(ConfigError, match="in use"):
            Exposition(sink.url.removeprefix("http://").removesuffix("/metrics"))
    finally:
        sink.close()
    for address in ("nowhere", "127.0.0.1:99999", "127.0.0.1:x"):
        with pytest.raises(ConfigError, match="--metrics-address"):
            Exposition(address)


NUM_IDLE = max(200, int(os.environ.get("PIBROCH_SOAK_CONNECTIONS", "0")))


def test_idle_connections_take_no_threads_and_have_a_bound():
    """The ones that have waited longest are closed for new ones; who asks is answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * NUM_IDLE)), hard))
    sink = Exposition("127.0.0.1:0")
    address = ("127.0.0.1", int(sink.url.split(":")[2].split("/")[0]))
    idle = []
    try:
        get(sink.url)
        num_threads = threading.active_count()
        for _ in range(NUM_IDLE):
            idle.append(socket.create_connection(address, 20))
            idle[-1].sendall(b"GET /metrics HTTP/1.1\r\n")  # a head without its end
        assert "pibroch_run_alarms_total" in get(sink.url)
        assert threading.active_count() == num_threads
        open_here = sum(not is_closed(each) for each in idle)
        assert open_here <= 64
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(sink.url.replace("metrics", "figures"))
    finally:
        for each in idle:
            each.close()
        sink.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not [each for each in threading.enumerate() if each.name == "pibroch-http"]


def is_closed(connection):
    """Whether the other end has closed it; nothing else is ever received here."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


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
