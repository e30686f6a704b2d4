"""Generated streams: the same events however they are written, and what is known of their truth."""

import json
import os
import signal
import time

import numpy as np
import polars as pl
import pytest

from kafka_cluster import Cluster
from pibroch.data import event_sinks
from pibroch.data.event_sinks import EventFolder, EventFormat, KafkaTopic, Pace, generate
from pibroch.data.event_stream import EventStream, StreamOptions
from pibroch.data.event_windows import WindowRule
from pibroch.data.planted import TruthMeter
from pibroch.data.schema import Schema
from pibroch.data.streams.kafka import Kafka
from pibroch.data.synthetic import Generator, SyntheticOptions
from pibroch.errors import ConfigError, StorageError
from served import until
from small_run import files_below, run_command, start_command

OPTIONS = StreamOptions(
    start_ms=1_700_000_000_000,
    seconds=20.0,
    rate=200.0,
    table_rows=300,
    drift=0.1,
    drift_every_s=4.0,
    turn_s=40.0,
    late=0.1,
    late_by_s=3.0,
)
FAST = Pace(part_s=1.0, window_s=5.0, in_real_time=False)
READ = {"csv": pl.read_csv, "jsonl": pl.read_ndjson, "parquet": pl.read_parquet}


def events_in(folder):
    paths = sorted(folder.iterdir())
    assert all(not path.name.startswith(".") for path in paths)
    return pl.concat([READ[path.suffix[1:]](path) for path in paths])


@pytest.mark.parametrize("format_", list(EventFormat))
def test_files_have_the_events_in_order(tmp_path, format_):
    written = generate(OPTIONS, EventFolder(tmp_path / "events", format_), tmp_path / "truth", FAST)
    assert written == 4000 and len(list((tmp_path / "events").iterdir())) == 20
    events = events_in(tmp_path / "events")
    whole, truth = EventStream(OPTIONS).frames(0, 4000)
    assert set(events.columns) == set(whole.columns)
    events = events.select(whole.columns)  # JSON has no order
    assert np.array_equal(events.to_numpy(), whole.to_numpy())
    assert events["event_id"].to_list() == list(range(4000))
    ahead = events["time"].cum_max() - events["time"]
    assert 0.05 < (ahead > 5).mean() < 0.11 and ahead.max() < 3000
    schema = Schema.load(tmp_path / "truth" / "schema.toml")
    assert schema.time == "time" and schema.time_unit == "ms"
    assert set(schema.used_columns()) == {*events.columns} - {"event_id"}
    known = pl.concat(map(pl.read_parquet, sorted((tmp_path / "truth" / "truth").iterdir())))
    assert np.array_equal(known.to_numpy(), truth.to_numpy())
    clicks = known["label"].mean()
    assert abs(clicks - known["probability"].mean()) < 0.03 and 0.15 < clicks < 0.4


def test_windows_say_how_well_the_truth_ranks(tmp_path):
    generate(OPTIONS, EventFolder(tmp_path / "events", EventFormat.CSV), tmp_path / "truth", FAST)
    lines = (tmp_path / "truth" / "windows.jsonl").read_text().splitlines()
    windows = [json.loads(line) for line in lines]
    _, truth = EventStream(OPTIONS).frames(0, 4000)
    begins = WindowRule(5000).begins(truth["time"].to_numpy())
    assert [each["begin_ms"] for each in windows] == np.unique(begins).tolist()
    assert sum(each["num_samples"] for each in windows) == 4000, "none is later than it may be"
    for window in windows:
        meter = TruthMeter()
        inside = begins == window["begin_ms"]
        meter.add(truth["logit"].to_numpy()[inside], truth["label"].to_numpy()[inside])
        assert window["end_ms"] == window["begin_ms"] + 5000
        assert window == pytest.approx({**window, **meter.metrics()})
    assert all(each["auc"] > 0.7 for each in windows if each["num_samples"] > 500)


def test_a_killed_generator_goes_on_where_it_was(tmp_path):
    line = ["stream", "generate", "--seconds", 60, "--rate", 100, "--late", 0.2, "--window", 10]
    line += ["--table-rows", 100, "--start", "2026-01-02T03:04"]
    folders = {name: (tmp_path / name / "events", tmp_path / name / "truth") for name in "ab"}
    out, truth = folders["a"]
    for _ in range(2):
        with start_command(*line, "--out", out, "--truth", truth, "--fast") as program:
            before = len(list(out.iterdir())) if out.exists() else 0
            until(lambda n=before: out.exists() and len(list(out.iterdir())) > n + 5)
            os.kill(program.pid, signal.SIGKILL)
            program.end()
    for out, truth in folders.values():
        ended = run_command(*line, "--out", out, "--truth", truth, "--fast")
        assert ended.returncode == 0, ended.stderr
    assert " a second; their truth is in " in ended.stdout
    whole = {name: files_below(tmp_path / name) for name in "ab"}
    left = {name for name in whole["a"] if name.endswith(".tmp")}
    assert {name: text for name, text in whole["a"].items() if name not in left} == whole["b"]
    again = run_command(*line, "--out", out, "--truth", truth, "--fast")
    assert again.stdout.startswith("0 events")
    other = run_command(*line, "--seed", 7, "--out", out, "--truth", truth, "--fast")
    assert other.returncode == 2 and "seed = 7" in other.stderr


def test_events_come_when_their_time_comes(tmp_path):
    start = time.time()
    options = StreamOptions(round(start * 1000), seconds=1.5, rate=100.0, table_rows=50)
    folder = EventFolder(tmp_path / "events", EventFormat.JSONL)
    generate(options, folder, tmp_path / "truth", Pace(part_s=0.5))
    for path in (tmp_path / "events").iterdir():
        newest = READ["jsonl"](path)["time"].max() / 1000
        assert newest <= path.stat().st_mtime < newest + 60
    assert time.time() - start >= 1.5


def test_preferences_turn_and_the_best_stays():
    quarter = 20_000
    straight = Generator(SyntheticOptions(10 * quarter, max_table_rows=200, raw=True))
    turned = Generator(SyntheticOptions(10 * quarter, max_table_rows=200, raw=True, turn=quarter))
    correlations = []
    for first in (0, quarter, 2 * quarter):
        old = straight.events(first, 4000)
        new = turned.events(first, 4000)
        assert np.array_equal(old.ids, new.ids) and np.array_equal(old.counts, new.counts)
        correlations.append(np.corrcoef(old.logits, new.logits)[0, 1])
        assert 0.7 < new.logits.std() / old.logits.std() < 1.4
        rows, logits = turned.samples(first, 4000)
        assert np.array_equal(logits, new.logits) and np.array_equal(rows.labels, new.labels)
        assert np.array_equal(rows.dense, np.log1p(new.counts).astype(np.float32))
    assert correlations[0] > 0.98 and abs(correlations[1]) < 0.3 and correlations[2] < -0.95


def test_a_topic_has_each_event_once_and_a_lost_broker_is_an_error(tmp_path, monkeypatch):
    line = ["stream", "generate", "--rate", 100, "--table-rows", 50, "--fast", "--topic", "clicks"]
    with Cluster() as cluster:
        line += ["--kafka", cluster.brokers]
        ended = run_command(*line, "--seconds", 5, "--truth", tmp_path / "truth")
        assert ended.returncode == 0, ended.stderr
        schema = Schema.load(tmp_path / "truth" / "schema.toml")
        source = Kafka(cluster.brokers, "clicks", schema)
        texts = []
        for name in source.partitions:
            partition = source.open(name)
            while (records := partition.next(1000)) is not None or partition.is_waiting:
                texts += [] if records is None else records.text.splitlines()
            partition.close()
        source.close()
        assert len(texts) == len(set(texts)) == 500
        cluster.kill()
        monkeypatch.setattr(event_sinks, "_KAFKA_S", 2.0)
        with pytest.raises(StorageError, match=r"Kafka at .*not taken after 2 s"):
            generate(OPTIONS, KafkaTopic(cluster.brokers, "clicks"), tmp_path / "lost", FAST)
    assert not list((tmp_path / "lost" / "truth").iterdir()), "it goes on with this part"


def test_options_that_make_no_sense(tmp_path):
    folder = EventFolder(tmp_path / "events", EventFormat.CSV)
    for options, pace in (
        (StreamOptions(0, 0.0, 10.0), FAST),
        (StreamOptions(0, 10.0, 0.1), FAST),
        (StreamOptions(0, 10.0, 10.0, turn_s=-1), FAST),
    ):
        with pytest.raises(ConfigError):
            generate(options, folder, tmp_path / "truth", pace)
    for line in (
        (),
        ("--out", "x", "--kafka", "y"),
        ("--kafka", "y"),
        ("--out", "x", "--start", "a"),
    ):
        ended = run_command("stream", "generate", "--seconds", 1, "--truth", tmp_path / "t", *line)
        assert ended.returncode == 2, line
