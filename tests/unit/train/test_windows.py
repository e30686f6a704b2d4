"""Windows of event time against figures that are computed record by record."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import pibroch as pb
from event_clicks import WINDOWS, prepared_events
from pibroch.collectives.world import World
from pibroch.config.train import WindowsConfig
from pibroch.data import JaggedBatch
from pibroch.data.schema import Schema
from pibroch.errors import CheckpointError, ConfigError
from pibroch.observability.records import FanOut
from pibroch.observability.report import write_report
from pibroch.serve.export import export_checkpoint
from pibroch.state.dense import WINDOWS as WINDOWS_FILE
from pibroch.state.manifest import read_manifest
from pibroch.state.versions import numbered
from pibroch.train.data_source import open_dataset
from pibroch.train.metrics import Predictions
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory
from pibroch.train.windows import ProgressiveWindows
from small_run import make_config

SCHEMA = Schema.from_toml('label = "y"\ntime = "t"\n[categorical.c]\n')
TWO = Schema.from_toml(
    'labels = ["y", "price", "z"]\ntime = "t"\n[target.price]\nkind = "number"\n[categorical.c]\n'
)
TOLERANCES = {"auc": 2e-3, "logloss": 1e-6, "normalized_entropy": 1e-5, "calibration": 1e-5}
"""Of windows of a hundred samples."""
SETTINGS = WindowsConfig(seconds=1.0, lateness_seconds=1.5, least_samples=100)


def made(settings=SETTINGS, schema=SCHEMA):
    return ProgressiveWindows(schema, settings, World.alone().control)


def batch_of(times, labels, weights=None):
    size = len(times)
    return JaggedBatch(
        torch.empty(size, 0),
        ("c",),
        torch.zeros(size, dtype=torch.int64),
        torch.arange(size + 1),
        torch.from_numpy(labels.astype(np.float32)),
        sample_weights=None if weights is None else torch.from_numpy(weights),
        event_times=torch.from_numpy(times),
    )


def stream(num_steps, size=50, seed=0, tasks=(), most_late=3000):
    """Steps of events that come up to three seconds late, at 100 a second."""
    rng = np.random.default_rng(seed)
    for step in range(1, num_steps + 1):
        times = 1_700_000_000_000 + (step - 1) * size * 10 + np.arange(size) * 10
        late = rng.random(size) < 0.2
        times = times - late * rng.integers(0, most_late, size)
        logits = rng.normal(-1, 1.5, (size, *tasks)).astype(np.float32)
        labels = rng.random((size, *tasks)) < 1 / (1 + np.exp(-logits))
        yield step, times.astype(np.int64), logits, labels


def expected(steps, width=1000, lateness=1500):
    """Windows as they close: step, first millisecond, late so far, and exact figures."""
    watermark, late, windows, closed = -(2**62), 0, {}, []
    for step, times, logits, labels in steps:
        for time, logit, label in zip(times.tolist(), logits, labels, strict=True):
            begin = time // width * width
            if begin + width + lateness <= watermark:
                late += 1
            else:
                windows.setdefault(begin, []).append((logit, label))
        watermark = max(watermark, int(times.max()))
        for begin in sorted(windows):
            if begin + width + lateness <= watermark:
                predictions = Predictions()
                scores, truths = zip(*windows.pop(begin), strict=True)
                predictions.add(np.array(scores), np.array(truths, np.float32))
                closed.append((step, begin, late, predictions.result().metrics))
    return closed, watermark


@pytest.mark.parametrize("every", [1, 3, 64])
def test_figures_are_those_of_the_records_in_each_window_whenever_ranks_agree(every):
    steps = list(stream(40))
    windows = made()
    records = []
    for step, times, logits, labels in steps:
        windows.add(step, torch.from_numpy(logits), batch_of(times, labels))
        if step % every == 0:
            records += windows.settle()
    records += windows.settle()
    right, watermark = expected(steps)
    assert len(right) > 10 and right[-1][2] > 20, "some are late"
    assert windows.watermark == watermark
    assert [(each.step, each.begin_ms, each.num_late) for each in records] == [
        each[:3] for each in right
    ]
    for record, (*_, metrics) in zip(records, right, strict=True):
        assert record.num_samples == metrics.num_samples
        for name, tolerance in TOLERANCES.items():
            right_one = getattr(metrics, name)
            figure = getattr(record, name)
            assert (figure is None) == np.isnan(right_one)
            assert figure is None or figure == pytest.approx(right_one, abs=tolerance)
    assert sum(record.auc is not None for record in records) > 10


def add_records(windows, step, *times, weight=1.0):
    """Records at these times."""
    weights = np.full(len(times), weight, np.float32)
    batch = batch_of(np.array(times, np.int64), np.ones(len(times)), weights)
    windows.add(step, torch.zeros(len(times)), batch)


def test_a_window_is_over_with_the_record_at_its_end_and_lateness_and_not_before():
    windows = made()
    add_records(windows, 1, 0, 999)
    add_records(windows, 2, 2499)
    assert not windows.settle()
    add_records(windows, 3, 2500, 999)  # the latter comes with what closes its window
    add_records(windows, 4, 999)
    (record,) = windows.settle()
    assert (record.step, record.begin_ms, record.num_samples, record.num_late) == (3, 0, 3, 0)
    add_records(windows, 5, 3499)
    assert not windows.settle(), "1000 to 2000 has no records"
    add_records(windows, 6, 4500)
    assert [(each.begin_ms, each.num_late) for each in windows.settle()] == [(2000, 1)]


def test_records_that_weigh_nothing_open_no_window():
    windows = made()
    add_records(windows, 1, 0, 1, weight=0.0)
    add_records(windows, 2, 1000, 4000)
    assert [each.begin_ms for each in windows.settle()] == [1000]


def test_auc_of_many_samples_is_that_of_exact_logits():
    windows = made(WindowsConfig(seconds=1000, lateness_seconds=0))
    steps = list(stream(40, size=2000))
    for step, times, logits, labels in steps:
        windows.add(step, torch.from_numpy(logits), batch_of(times, labels))
    for step in (41, 42):
        windows.add(step, torch.zeros(1), batch_of(np.array([2_000_000_000_000]), np.array([0])))
    records = windows.settle()
    right, _ = expected([*steps, (41, np.array([2_000_000_000_000]), [0.0], [0])], 1_000_000, 0)
    assert len(records) == 2
    for record, (*_, metrics) in zip(records, right, strict=True):
        assert abs(record.auc - metrics.auc) < 5e-6


def test_what_a_checkpoint_has_goes_on_to_the_same_bits():
    steps = list(stream(60))
    right = []
    whole = made()
    for step, times, logits, labels in steps:
        whole.add(step, torch.from_numpy(logits), batch_of(times, labels))
        right += whole.settle()
    for cut in range(1, 60, 7):
        first, second = made(), made()
        records = []
        for step, times, logits, labels in steps[:cut]:
            first.add(step, torch.from_numpy(logits), batch_of(times, labels))
        records += first.settle()
        state = {name: each.clone() for name, each in first.state().items()}
        shapes = [each.shape for each in made().state().values()]
        assert [each.shape for each in state.values()] == shapes, "memory is reserved for it"
        second.load_state(state)
        for step, times, logits, labels in steps[cut:]:
            second.add(step, torch.from_numpy(logits), batch_of(times, labels))
        assert records + second.settle() == right
        assert all(torch.equal(each, whole.state()[name]) for name, each in second.state().items())


def test_other_windows_begin_anew_and_damaged_ones_are_refused():
    windows = made()
    for step, times, logits, labels in stream(3):
        windows.add(step, torch.from_numpy(logits), batch_of(times, labels))
    windows.settle()
    state = windows.state()
    other = made(WindowsConfig(seconds=2.0))
    other.load_state(state)
    assert other.watermark is None
    other.go_on(windows.watermark)
    assert other.watermark == windows.watermark
    other.go_on(windows.watermark + 5)
    other.go_on(windows.watermark + 3)
    other.go_on(None)
    assert other.watermark == windows.watermark + 5, "time of an earlier process never goes back"
    with pytest.raises(CheckpointError, match="other shapes"):
        made().load_state({**state, "counts": state["counts"][:1]})


@pytest.mark.parametrize("every", [1, 3, 64])
def test_wrong_clocks_close_no_windows_and_a_silence_does(every):
    """One event in five steps is a year ahead; two days are without any."""
    year, silence = 365 * 86_400_000, 2 * 86_400_000
    steps = [
        (step, times + silence * (step > 30), logits, labels)
        for step, times, logits, labels in stream(50)
    ]
    wrong = [
        (step, np.append(times, times[0] + year) if step % 5 == 2 else times, logits, labels)
        for step, times, logits, labels in steps
    ]
    records, watermarks = [[], []], []
    for number, each in enumerate((steps, wrong)):
        windows = made()
        for step, times, logits, labels in each:
            more = len(times) - len(logits)
            batch = batch_of(times, np.append(labels, [False] * more))
            windows.add(step, torch.from_numpy(np.append(logits, [0.0] * more)), batch)
            if step % every == 0:
                records[number] += windows.settle()
                again = made()
                again.load_state(windows.state())
                windows = again
        records[number] += windows.settle()
        watermarks.append(windows.watermark)
    right, found = records
    assert [replace(each, num_ahead=0) for each in found] == [
        replace(each, num_ahead=0) for each in right
    ]
    assert watermarks[0] == watermarks[1] == max(times.max() for _, times, *_ in steps)
    closing = {each.step for each in right}
    assert 32 in closing and 31 not in closing, "the second step after the silence confirms it"
    assert right[-1].num_ahead == 50, "its first step alone"
    assert found[-1].num_ahead > 55


def test_weights_and_several_labels():
    rng = np.random.default_rng(1)
    windows = made(schema=TWO.model_copy(update={"weight": "w"}))
    rows = []
    for step, times, logits, labels in stream(20, tasks=(3,), most_late=900):
        weights = rng.integers(0, 3, len(times)).astype(np.float32)
        rows.append((times, logits, labels, weights))
        windows.add(step, torch.from_numpy(logits), batch_of(times, labels, weights))
    first = windows.settle()[3]
    times, logits, labels, weights = map(np.concatenate, zip(*rows, strict=True))
    inside = (times >= first.begin_ms) & (times < first.end_ms)
    assert first.tasks.keys() == {"y", "z"} and first.auc == first.tasks["y"]["auc"]
    assert first.num_samples == (weights[inside] > 0).sum()
    for name, column in (("y", 0), ("z", 2)):
        scores = logits[inside, column].astype(float)
        hits = labels[inside, column]
        losses = np.logaddexp(0, scores) - scores * hits
        share = weights[inside] / weights[inside].sum()
        assert first.tasks[name]["logloss"] == pytest.approx(losses @ share, abs=1e-6)
        predicted = 1 / (1 + np.exp(-scores))
        calibration = predicted @ share / (hits @ share)
        assert first.tasks[name]["calibration"] == pytest.approx(calibration, abs=1e-5)
        plain = Predictions()
        plain.add(logits[inside, column], labels[inside, column].astype(np.float32))
        right = asdict(plain.result().metrics)
        for figure, tolerance in (TOLERANCES | {"num_samples": 0}).items():
            got = first.tasks[name][f"{figure}_unweighted"]
            assert got == pytest.approx(right[figure], abs=tolerance)
    again = made(schema=TWO.model_copy(update={"weight": "w"}))
    again.load_state(windows.state())
    assert all(torch.equal(each, windows.state()[name]) for name, each in again.state().items())


def test_steps_without_samples_and_without_windows():
    windows = made()
    for step, times, logits, labels in stream(3):
        windows.add(step, torch.from_numpy(logits), batch_of(times, labels))
        nothing = torch.empty(0), batch_of(times[:0], labels[:0])
        windows.add(step + 1, *nothing)
    assert windows.settle() and not windows.settle()
    plain = made(None)
    assert plain.watermark is None and plain.state().keys() == {"about"}
    for step, times, logits, labels in stream(3):
        plain.add(step, torch.from_numpy(logits), batch_of(times, labels))
    assert plain.settle() == [] and plain.watermark == windows.watermark


def test_alarms_name_what_left_its_band():
    bands = {"auc": (0.9, 1.0), "calibration": (0.5, 1.5), "least_samples": 50}
    settings = SETTINGS.model_copy(update=bands)
    windows = made(settings)
    for step, times, logits, labels in stream(40):
        windows.add(step, torch.from_numpy(logits - 2 * (step > 20)), batch_of(times, labels))
    alarms = [each.alarms for each in windows.settle() if each.num_samples >= 50]
    assert len(alarms) > 3
    assert all(each[0].startswith("AUC 0.") and "outside 0.9 to 1" in each[0] for each in alarms)
    assert len(alarms[0]) == 1 and "calibration 0." in alarms[-1][1]
    silent = made(settings.model_copy(update={"least_samples": 10_000}))
    for step, times, logits, labels in stream(40):
        silent.add(step, torch.from_numpy(logits), batch_of(times, labels))
    assert not any(each.alarms for each in silent.settle())


class Stop(FanOut):
    """Ends a run when its records come to a step, as a signal might."""

    def __init__(self, step):
        super().__init__([])
        self._step = step

    def training(self, record):
        if record.step == self._step:
            raise KeyboardInterrupt


def windows_of(run):
    return [record for record in run.metrics() if record["kind"] == "window"]


def trained(data, folder, *settings, stops=()):
    """A run that is stopped at some steps, and goes on from its last checkpoint."""
    config = make_config(data, "train.steps=40", "train.checkpoint_every=3", *settings)
    run = RunDirectory(folder)
    run.create(config)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            run_training(config, open_dataset(config.data), run, lambda _, s=stop: Stop(s))
    run_training(config, open_dataset(config.data), run, lambda _: FanOut([]))
    return run


def test_a_run_that_goes_on_reports_the_windows_of_one_that_never_stopped(tmp_path):
    data = prepared_events(tmp_path / "data")
    whole = trained(data, tmp_path / "whole", *WINDOWS)
    right = windows_of(whole)
    assert len(right) > 5 and right[-1]["step"] > 20 and right[-1]["num_late"] > 0
    assert [each["begin_ms"] for each in right] == sorted({each["begin_ms"] for each in right})
    assert any(each["alarms"] for each in right)
    figures = [record for record in whole.metrics() if record["kind"] == "training"]
    assert figures[-1]["event_time"] > 1_700_000_000_000
    again = trained(data, tmp_path / "again", *WINDOWS, "train.log_every=7", stops=(7, 21, 28))
    assert windows_of(again) == right
    last = [each.checkpoints_path / "step-00000040" for each in (whole, again)]
    assert (last[0] / WINDOWS_FILE).read_bytes() == (last[1] / WINDOWS_FILE).read_bytes()
    assert read_manifest(last[0]).progress.event_time == figures[-1]["event_time"]


def test_versions_say_until_when_they_were_trained(tmp_path):
    data = prepared_events(tmp_path / "data")
    models = tmp_path / "models"
    publish = [f"train.publish_to={models}", "train.publish_every_seconds=1e-9"]
    run = trained(data, tmp_path / "run", "train.log_every=1", *publish)
    assert not windows_of(run), "none were asked for"
    at = {each["step"]: each["event_time"] for each in run.metrics() if each["kind"] == "training"}
    times = []
    for number in numbered(models):
        predictor = pb.Predictor.open(models / str(number))
        assert predictor.event_time == at[predictor.step]
        times.append(predictor.event_time)
    assert len(times) > 2 and times == sorted(times)
    predictor = pb.Predictor.open(run.checkpoints_path / "step-00000039")
    assert predictor.event_time == at[39]
    export_checkpoint(run.checkpoints_path / "step-00000039", tmp_path / "export")
    assert pb.Predictor.open(tmp_path / "export").event_time == at[39]
    page = write_report(
        trained(data, tmp_path / "w", *WINDOWS).path, tmp_path / "page.html"
    ).read_text()
    assert "Windows of event time" in page and "windows with an alarm" in page


def test_data_without_times_have_no_windows():
    with pytest.raises(ConfigError, match="without event times"):
        made(schema=Schema.from_toml('label = "y"\n[categorical.c]\n'))
    with pytest.raises(ValueError, match="at most 100 windows"):
        WindowsConfig(seconds=1, lateness_seconds=101)
