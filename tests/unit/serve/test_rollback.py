"""Servers that go back to an earlier published version, and how old a version says it is."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest

import pibroch as pb
from pibroch.errors import CheckpointError
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.store import find_target
from pibroch.state.event_time import EVENT_TIME, event_time_of, write_event_time
from pibroch.state.export_format import read_export
from pibroch.state.versions import ROLLBACK, roll_back
from served import Load, serving, until
from small_run import run_command

RELOAD = ("--reload-every", 0.05)


@pytest.fixture
def models(clicks, tmp_path):
    """1: a whole export, 2: a delta on it, 3: another whole export."""
    folder = tmp_path / "models"
    rows = clicks.rows[:24]
    export_checkpoint(clicks.run, folder / "1", ExportOptions())
    export_delta(clicks.run, folder / "1", folder / "2", ExportOptions(version="second"))
    export_checkpoint(clicks.run, folder / "3", ExportOptions("int8"))
    expected = {}
    names = []
    for number in (1, 2, 3):
        predictor = pb.Predictor.open(folder / str(number))
        names.append(predictor.version)
        expected[predictor.version] = predictor.score_raw(rows).numpy()
    return SimpleNamespace(folder=folder, names=names, rows=rows, expected=expected)


def publish(*arguments):
    ended = run_command("publish", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_servers_go_back_and_stay_until_told_otherwise(models, tmp_path):
    first, second, third = models.names
    with (
        serving(models.folder, *RELOAD) as server,
        serving(models.folder, *RELOAD, "--workers", 2) as other,
        Load(server, models, 1) as load,
        Load(other, models, 2) as others,
    ):

        def until_all_serve(version):
            for each in (load, others):
                each.until_seen(version)
            until(
                lambda: all(
                    each.ask("POST", "/score", {"rows": models.rows}).json["model_version"]
                    == version
                    for each in (server, other, other, other)
                )
            )

        until_all_serve(third)
        assert "stay at version 2, after 3" in publish("rollback", models.folder, "--to", 2)
        until_all_serve(second)
        shutil.copytree(models.folder / "3", models.folder / "fresh").rename(models.folder / "4")
        assert "stay at version 1, after 2" in publish("rollback", models.folder, "--to", 1)
        until_all_serve(first)
        listed = publish("list", models.folder)
        assert "rolled back: servers stay at version 1" in listed
        assert [line.split()[1] for line in listed.splitlines() if " yes " in line] == ["1"]
        assert "newest version: 4" in publish("rollback", models.folder, "--newest")
        until_all_serve(third)
        assert server.metric("pibroch_model_load_failures") == 0
    assert not load.failures and not others.failures


def test_what_cannot_be_gone_back_to(models):
    def refused(*arguments):
        ended = run_command("publish", *arguments)
        assert ended.returncode == 2 and not (models.folder / ROLLBACK).exists()
        return ended.stderr

    assert "version 9 in" in refused("rollback", models.folder, "--to", 9)
    assert "neither --to nor --newest" in refused("rollback", models.folder)
    assert "no numbered versions" in refused("rollback", models.folder / "1", "--to", 1)
    shutil.rmtree(models.folder / "1")
    assert "a delta since" in refused("rollback", models.folder, "--to", 2)


def test_a_version_that_goes_while_servers_are_at_it(models):
    roll_back(models.folder, 1)
    assert find_target(models.folder).folder.name == "1"
    (models.folder / "1").rename(models.folder / "gone")
    with pytest.raises(CheckpointError, match="rolled back to version 1, which is not there"):
        find_target(models.folder)
    (models.folder / ROLLBACK).write_text("{}")
    with pytest.raises(CheckpointError, match="no `sha256`"):
        find_target(models.folder)


def test_answers_say_how_old_the_model_is_in_event_time(models):
    then = int(time.time() * 1000) - 60_000
    write_event_time(models.folder / "3", then)
    assert event_time_of(models.folder / "3") == then
    with serving(models.folder, *RELOAD) as server:
        body = {"rows": models.rows[:1]}
        tensors = {
            "inputs": [
                {"name": name, "shape": [1], "datatype": "BYTES", "data": [value]}
                for name, value in models.rows[0].items()
                if name != "clicked"
            ]
        }
        infer = server.ask("POST", "/v2/models/models/infer", tensors).json["parameters"]
        lines = server.ask("POST", "/score", body, {"accept": "text/csv"}).headers
        for ages in (
            server.ask("POST", "/score", body).json,
            server.ask("POST", "/embed", body).json,
            server.ask("GET", "/v2/models/models").json,
            infer,
            {
                key[2:].replace("-", "_"): float(lines[key])
                for key in lines
                if "model-" in key and key != "x-model-version"
            },
        ):
            assert ages["model_event_time_ms"] == then
            assert 60 <= ages["model_age_seconds"] < 160
        assert server.metric("pibroch_model_event_time_ms") == then
        assert 60 <= server.metric("pibroch_model_age_seconds") < 160
        assert "yes" in publish("list", models.folder)
        publish("rollback", models.folder, "--to", 1)
        until(lambda: server.ask("POST", "/score", body).json["model_version"] == models.names[0])
        assert "model_event_time_ms" not in server.ask("POST", "/score", body).json


def test_an_event_time_is_that_of_the_manifest_beside_it(models):
    write_event_time(models.folder / "1", 5)
    shutil.copy(models.folder / "1" / EVENT_TIME, models.folder / "2" / EVENT_TIME)
    assert event_time_of(models.folder / "2") is None
    content = json.loads((models.folder / "1" / EVENT_TIME).read_text())
    (models.folder / "1" / EVENT_TIME).write_text(json.dumps({**content, "event_time": 6}))
    assert event_time_of(models.folder / "1") is None
    assert read_export(models.folder / "1").version == models.names[0], "its files are untouched"
