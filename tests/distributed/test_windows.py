"""Windows of event time are those of all ranks' events, whoever is killed meanwhile."""

import json
import os
import signal
import urllib.request

import pytest
import training_cases as cases
from launched_team import Team, wait_until
from test_recovery import restarts

from event_clicks import WINDOWS, prepared_events
from pibroch.config import to_toml
from pibroch.data.event_sinks import EventFolder, EventFormat, Pace, generate
from pibroch.data.event_stream import StreamOptions
from pibroch.ports import free_port
from pibroch.train.run_directory import RunDirectory
from small_run import make_config

SETTINGS = [*WINDOWS, "model.dropout=0", "model.batch_norm=false"]


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return prepared_events(tmp_path_factory.mktemp("events") / "data")


def windows_of(run):
    return [each for each in RunDirectory(run).metrics() if each["kind"] == "window"]


def test_any_number_of_ranks_has_the_same_windows(worlds, events, tmp_path):
    found = {}
    for size in (1, 2, 3):
        config = make_config(events, *SETTINGS, "train.steps=24", f"train.log_every={3 + size}")
        worlds(size).run(cases.train, config.model_dump(), str(tmp_path / f"run{size}"))
        found[size] = windows_of(tmp_path / f"run{size}")
        for rank in range(1, size):
            run = RunDirectory(tmp_path / f"run{size}", rank)
            assert found[size] == [each for each in run.metrics() if each["kind"] == "window"]
    assert len(found[1]) > 4
    for size in (2, 3):
        for one, many in zip(found[1], found[size], strict=True):
            for name in ("step", "begin_ms", "end_ms", "num_samples", "num_late"):
                assert one[name] == many[name]
            for name in ("auc", "logloss", "calibration"):
                assert (one[name] is None) == (many[name] is None)
                assert one[name] is None or many[name] == pytest.approx(one[name], abs=1e-3)


@pytest.mark.parametrize("cuts", [0, 0.05], ids=["from a checkpoint", "from memory"])
def test_killed_ranks_leave_the_windows_as_they_are(tmp_path, cuts):
    events = prepared_events(tmp_path / "data", 12_000)
    lines = {}
    for name in ("whole", "killed"):
        config = make_config(
            events,
            *SETTINGS,
            "train.steps=190",
            "train.batch_size=50",
            "train.checkpoint_every=10",
            "train.log_every=3",
            f"train.cut_every_seconds={cuts}",
        )
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(to_toml(config.model_dump()))
        run = tmp_path / name
        line = [recipe, "--run-dir", run, "--ranks", 2, "--restarts", 9]
        with Team(*line) as team:
            for number, victim in enumerate((1, 0) if name == "killed" else ()):
                wait_until(lambda n=number, run=run: newest_step(run) > 5 + 30 * n, 120)
                os.kill(team.pids()[victim], signal.SIGKILL)
                wait_until(lambda n=number, run=run: len(restarts(run)) > n, 60)
            assert team.end() == 0, team.output
        lines[name] = windows_of(run)
    assert len(restarts(tmp_path / "killed")) == 2
    assert lines["killed"] == lines["whole"]
    steps = {each["step"] for each in lines["whole"]}
    assert min(steps) < 5 and max(steps) > 100, "before, between and after the deaths"


STREAM = """
[data.stream]
path = "{folder}/events"
partitions = 1
schema_file = "{folder}/truth/schema.toml"
[model]
name = "deepfm"
dim = 4
top = [8]
[embedding.rows]
name = "hashed"
capacity = 400
[train]
batch_size = 100
log_every = 3
checkpoint_every = 10
threads = 1
[train.windows]
seconds = 5
lateness_seconds = 20
"""


def test_each_event_of_a_stream_counts_once_in_its_window_whoever_is_killed(tmp_path):
    options = StreamOptions(1_700_000_000_000, 60.0, 200.0, table_rows=100, late=0.1, late_by_s=5)
    pace = Pace(part_s=1.0, window_s=5.0, in_real_time=False)
    generate(options, EventFolder(tmp_path / "events", EventFormat.CSV), tmp_path / "truth", pace)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(STREAM.format(folder=tmp_path))
    run = tmp_path / "run"
    address = f"127.0.0.1:{free_port()}"
    line = [recipe, "--run-dir", run, "--ranks", 2, "--restarts", 9]
    with Team(*line, "--metrics-address", address) as team:
        for number, victim in enumerate((1, 0)):
            wait_until(lambda n=number: newest_step(run) > 15 + 30 * n, 120)
            wait_until(lambda: "pibroch_run_event_time 1.7" in metrics_at(address), 60)
            os.kill(team.pids()[victim], signal.SIGKILL)
            wait_until(lambda n=number: len(restarts(run)) > n, 60)
        assert team.end() == 0, team.output
    lines = (tmp_path / "truth" / "windows.jsonl").read_text().splitlines()
    right = {each["begin_ms"]: each for each in map(json.loads, lines)}
    windows = windows_of(run)
    assert len(windows) > 5 and windows[-1]["num_late"] == 0
    for window in windows:
        best = right[window["begin_ms"]]
        assert window["num_samples"] == best["num_samples"]
        assert window["auc"] < best["auc"] + 0.02
    assert windows[-1]["auc"] > 0.55
    assert RunDirectory(run).read_json("summary.json")["samples"] == 12_000


def metrics_at(address):
    """What a run says of itself; nothing while it is started again."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def newest_step(run):
    path = run / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in whole), default=0)
