"""`pibroch train` over a directory that another process fills, killed and gone on with."""

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter

import pytest
from launched_team import Team, wait_until

from grids import cells, some
from kafka_cluster import Cluster
from pibroch.config import to_toml
from pibroch.config.recipes import check_config
from pibroch.data.streams.journal import Journal
from small_run import files_below, run_command
from stream_files import SCHEMA, csv_text, events, file_bytes, json_text

EVENTS = 3000
FILES = 30
RECIPE = {
    "seed": 3,
    "model": {"name": "dlrm", "dim": 4, "bottom": [8], "top": [16], "dropout": 0.2},
    "embedding": {
        "optimizer": {"name": "adam", "lr": 0.01},
        "rows": {"name": "hashed", "capacity": 64},
        "exchange": {"name": "alltoall"},
    },
    "optimizer": {"name": "adam", "lr": 0.01},
    "train": {
        "batch_size": 40,
        "log_every": 1,
        "threads": 1,
        "checkpoint_every": 20,
        "checkpoint_every_seconds": 0.2,
        "keep": 9,
    },
}


def write_recipe(folder, **settings):
    (folder / "schema.toml").write_text(SCHEMA)
    (folder / "data").mkdir()
    stream = {
        "path": str(folder / "data"),
        "schema_file": str(folder / "schema.toml"),
        "partitions": 4,
        "wait_seconds": 0.05,
        **settings,
    }
    config = check_config(RECIPE | {"data": {"stream": stream}}, "the test's recipe")
    (folder / "recipe.toml").write_text(to_toml(config.model_dump()))
    return folder / "recipe.toml"


def fill(folder, seconds=0.0, files=FILES, first=0):
    """Files of events, now and then one that grows or gets its name when it is whole."""
    per_file = EVENTS // FILES
    for place in range(first, files):
        text = csv_text(events(place * per_file, (place + 1) * per_file))
        path = folder / f"part-{place:04d}.csv"
        if place % 3 == 0:
            with path.open("wb") as file:
                for start in range(0, len(text), 700):
                    file.write(text[start : start + 700])
                    file.flush()
                    time.sleep(seconds / 4)
        else:
            path.with_suffix(".tmp").write_bytes(text)
            path.with_suffix(".tmp").rename(path)
        time.sleep(seconds)


def trained(run):
    """How often each record is in a step, by its partition, file and line."""
    count = Counter()
    for _, ranges in Journal(run / "stream" / "journal").steps_after(0):
        for each in ranges:
            lines = range(each.line, each.line + each.records)
            count.update((each.partition, each.file, line) for line in lines)
    return count


def summary(run):
    return json.loads((run / "summary.json").read_text())


def records(run):
    return list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


def check_each_once(run, num_events=EVENTS):
    count = trained(run)
    assert len(count) == num_events and set(count.values()) == {1}
    assert summary(run)["samples"] == num_events


def check_same_bits(run, expected):
    """The newest checkpoints, but for the settings in their manifests."""
    newest = [sorted((folder / "checkpoints").glob("step-*"))[-1] for folder in (run, expected)]
    assert newest[0].name == newest[1].name
    files, right = map(files_below, newest)
    assert files.keys() == right.keys()
    assert [n for n in files if files[n] != right[n] and not n.endswith("manifest.json")] == []
    progress = [json.loads(each["manifest.json"])["progress"] for each in (files, right)]
    assert progress[0] == progress[1]


def undisturbed(run, ranks, *words, config=None):
    """The folder of a run in one go, of the steps that another one has decided.

    With that one's configuration, or another.
    """
    expected = run.with_name("undisturbed")
    expected.mkdir()
    (expected / "config.toml").write_text(config or (run / "config.toml").read_text())
    shutil.copytree(run / "stream" / "journal", expected / "stream" / "journal")
    words = ["--resume", "--until-idle", 1, "--ranks", ranks, *words]
    result = run_command("train", "--run-dir", expected, *words)
    assert result.returncode == 0, result.stderr
    return expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_is_trained_to_its_end(tmp_path, ranks):
    recipe = write_recipe(tmp_path)
    fill(tmp_path / "data")
    run = tmp_path / "run"
    result = run_command("train", recipe, "--run-dir", run, "--ranks", ranks)
    assert result.returncode == 0, result.stderr
    check_each_once(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_in_several_passes_are_those_of_one(tmp_path, ranks):
    recipe = write_recipe(tmp_path)
    fill(tmp_path / "data")
    whole = tmp_path / "run"
    result = run_command("train", recipe, "--run-dir", whole, "--ranks", ranks)
    assert result.returncode == 0, result.stderr
    config = (whole / "config.toml").read_text()
    for before, after in {
        "batch_size = 40": "batch_size = 10",
        "accumulate = 1": "accumulate = 4",
    }.items():
        assert config.count(f"\n{before}\n") == 1
        config = config.replace(f"\n{before}\n", f"\n{after}\n")
    passes = undisturbed(whole, ranks, config=config)
    check_each_once(passes)
    losses = [
        [each["loss"] for each in records(run) if each["kind"] == "training"]
        for run in (whole, passes)
    ]
    assert len(losses[0]) == summary(passes)["steps"] < EVENTS // 30, "of more than one pass"
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_following_ends_when_nothing_has_come_for_long_enough(tmp_path):
    recipe = write_recipe(tmp_path)
    run = tmp_path / "run"
    with Team(recipe, "--run-dir", run, "--ranks", 2, "--until-idle", 3) as team:
        fill(tmp_path / "data", 0.02)
        assert team.end() == 0, team.output
    check_each_once(run)


@pytest.mark.parametrize(
    ("ranks", "number"), some([(1, "SIGTERM"), (2, "SIGTERM"), (2, "SIGINT")], 0, 2)
)
def test_a_signal_ends_a_run_that_follows_and_it_goes_on(tmp_path, ranks, number):
    """Where it is a terminal's, all processes get it."""
    recipe = write_recipe(tmp_path)
    run = tmp_path / "run"
    fill(tmp_path / "data", files=10)
    with Team(recipe, "--run-dir", run, "--follow", "--ranks", ranks) as team:
        team.wait_for_step(run, 25)
        wait_until(lambda: len(trained(run)) == 1000 or team.process.poll() is not None)
        send = os.kill if number == "SIGTERM" else os.killpg
        send(team.process.pid, getattr(signal, number))
        stopped = 0 if ranks == 1 else 128 + getattr(signal, number)
        assert team.end() == stopped, team.output
    assert "as it was asked to" in team.output
    assert summary(run)["samples"] == 1000
    fill(tmp_path / "data", first=10)
    words = ["--resume", "--until-idle", 1, "--ranks", ranks]
    again = run_command("train", "--run-dir", run, *words)
    assert again.returncode == 0, again.stderr
    check_each_once(run)


def kill(team, run, rank, step):
    """Kill a rank in a step, and wait until both are there again."""
    pids = team.wait_for_step(run, step)
    os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: len(team.pids()) == 2 and team.pids() != pids)


@pytest.mark.parametrize(
    ("exchange", "source"), cells(["alltoall", "lookahead"], ["disk", "memory"])
)
def test_killed_ranks_train_each_event_once_and_to_the_same_bits(tmp_path, exchange, source):
    recipe = write_recipe(tmp_path)
    run = tmp_path / "run"
    words = ["--set", f"embedding.exchange={exchange}"]
    words += ["--set", "train.cut_every_seconds=0"] if source == "disk" else []
    writer = threading.Thread(target=fill, args=(tmp_path / "data", 0.05))
    with Team(
        recipe, "--run-dir", run, "--ranks", 2, "--restarts", 9, "--until-idle", 4, *words
    ) as team:
        writer.start()
        for rank, at in ((1, 10), (0, 40)):
            kill(team, run, rank, at)
        writer.join()
        assert team.end() == 0, team.output
    check_each_once(run)
    assert summary(run)["restarts"] == 2
    expected = undisturbed(run, 2)
    assert trained(expected) == trained(run)
    check_same_bits(run, expected)


def test_killed_ranks_train_each_row_of_parquet_once_and_to_the_same_bits(tmp_path):
    recipe = write_recipe(tmp_path)
    run = tmp_path / "run"
    per_file = EVENTS // FILES

    def fill_rows():
        for place in range(FILES):
            path = tmp_path / "data" / f"part-{place:04d}.parquet"
            rows = events(place * per_file, (place + 1) * per_file)
            path.with_suffix(".tmp").write_bytes(file_bytes("parquet", rows))
            path.with_suffix(".tmp").rename(path)
            time.sleep(0.05)

    writer = threading.Thread(target=fill_rows)
    words = ["--ranks", 2, "--restarts", 9, "--until-idle", 4]
    with Team(recipe, "--run-dir", run, *words) as team:
        writer.start()
        kill(team, run, 1, 10)
        writer.join()
        assert team.end() == 0, team.output
    check_each_once(run)
    check_same_bits(run, undisturbed(run, 2))


def test_killed_ranks_train_each_message_of_kafka_once_and_to_the_same_bits(tmp_path):
    run = tmp_path / "run"
    with Cluster() as cluster:
        kafka = {"kind": "kafka", "brokers": cluster.brokers, "topic": "clicks"}
        recipe = write_recipe(tmp_path, **kafka)
        messages = [(row["event"], json.dumps(row).encode()) for row in events(0, EVENTS)]
        cluster.send("clicks", messages[:1000])
        words = ["--ranks", 2, "--restarts", 9, "--until-idle", 3]
        with Team(recipe, "--run-dir", run, *words) as team:
            cluster.send("clicks", messages[1000:2000])
            kill(team, run, 0, 35)
            cluster.signal(signal.SIGSTOP)
            time.sleep(1)
            cluster.signal(signal.SIGCONT)
            cluster.send("clicks", messages[2000:])
            assert team.end() == 0, team.output
        check_each_once(run)
        check_same_bits(run, undisturbed(run, 2))


def test_a_setting_that_kafka_does_not_have_is_wrong_input_and_begins_no_run(tmp_path):
    kafka = {"kind": "kafka", "brokers": "127.0.0.1:9", "topic": "clicks"}
    recipe = write_recipe(tmp_path, **kafka, kafka={"security.protcol": "ssl"})
    result = run_command("train", recipe, "--run-dir", tmp_path / "run")
    assert result.returncode == 2 and '"security.protcol"' in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()


def test_other_ranks_go_on_and_leave_nothing_out(tmp_path):
    recipe = write_recipe(tmp_path)
    run = tmp_path / "run"
    for ranks, files in ((2, 10), (1, 20), (3, 30)):
        fill(tmp_path / "data", files=files, first=files - 10)
        words = ["--resume", "--run-dir", run, "--ranks", ranks]
        result = run_command("train", recipe, *words)
        assert result.returncode == 0, result.stderr
    check_each_once(run)


def test_a_dataset_gives_vocabularies_and_samples_to_validate_with(tmp_path):
    """Of its dictionary, which stays as it is, unknown users read row 0."""
    (tmp_path / "known.csv").write_bytes(csv_text(events(0, 200)))
    (tmp_path / "schema.toml").write_text(SCHEMA.replace('encoding = "raw"', "min_count = 1"))
    words = ["--schema", tmp_path / "schema.toml", "--out", tmp_path / "known"]
    words += ["--split", "time:0.5/0.5/0"]
    prepared = run_command("data", "prepare", "csv", tmp_path / "known.csv", *words)
    assert prepared.returncode == 0, prepared.stderr
    (tmp_path / "data").mkdir()
    rows = events(200, 600)
    for row in rows[::5]:
        row["user"] = "nobody"
    (tmp_path / "data" / "a.jsonl").write_bytes(json_text(rows))
    without_rows = {**RECIPE["embedding"], "rows": "identity"}
    train = {**RECIPE["train"], "evaluate_every": 5}
    data = {"dir": str(tmp_path / "known"), "stream": {"path": str(tmp_path / "data")}}
    recipe = RECIPE | {"data": data, "embedding": without_rows, "train": train}
    config = check_config(recipe, "the test's recipe")
    (tmp_path / "recipe.toml").write_text(to_toml(config.model_dump()))
    run = tmp_path / "run"
    words = ["--run-dir", run, "--ranks", 2, "--set", f"train.publish_to={tmp_path / 'models'}"]
    result = run_command("train", tmp_path / "recipe.toml", *words)
    assert result.returncode == 0, result.stderr
    check_each_once(run, 400)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["step"] for line in lines if line["kind"] == "evaluation"]
    assert evaluated[:2] == [5, 10] and summary(run)["versions_published"] > 0
    assert list((tmp_path / "models").iterdir())
