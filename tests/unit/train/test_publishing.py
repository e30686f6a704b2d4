"""Versions that a run publishes: each has the rows and scores of an export of its step.

A version after each step, and a checkpoint of each step to compare with.
"""

import json
import logging
import shutil

import pytest

from pibroch.collectives import task_thread
from pibroch.embedding import shard as shards
from pibroch.errors import ConfigError
from pibroch.observability.records import FanOut
from pibroch.state.delta_format import checksum_in, is_delta
from pibroch.state.export_format import is_export
from pibroch.state.versions import go_forward, numbered, roll_back
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory
from published_versions import check_same, number_of, versions
from small_run import files_below, make_config

EVERY_STEP = [
    "train.steps=12",
    "train.checkpoint_every=1",
    "train.keep=99",
    "train.evaluate_every=100",
    "train.publish_every_seconds=1e-9",
]
RAW_IDS = [
    "train.batch_size=6",
    "embedding.rows={name='hashed', capacity=14}",
    "embedding.tables.C2.rows=identity",
]


class Stopped(Exception):
    """What ends a run at a step."""


class Waiting(FanOut):
    """Waits at each step until the version before is on the disk; may end the run."""

    def __init__(self, last=None, before=lambda step: None):
        super().__init__([])
        self._last = last
        self._before = before

    def training(self, record):
        for thread in list(task_thread._RUNNING):
            if thread.thread.name == "pibroch-published":
                thread.flush()
        self._before(record.step)
        if record.step == self._last:
            raise Stopped


def train(data, folder, *settings, last=None, before=lambda step: None):
    config = make_config(data, *EVERY_STEP, f"train.publish_to={folder / 'models'}", *settings)
    run = RunDirectory(folder / "run")
    if not run.exists():
        run.create(config)
    run_training(config, open_dataset(config.data), run, lambda _: Waiting(last, before))
    return run


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_each_version_is_an_export_of_its_step_and_chains_are_kept_whole(data, tmp_path, dtype):
    more = [f"train.publish_dtype={dtype}", "train.publish_compact_every=3"]
    more.append("train.publish_keep_seconds=0")
    run = train(data, tmp_path, *more)
    paths = versions(tmp_path / "models")
    assert [is_export(path) for path in paths] == [True, *3 * [False], True, False, False]
    assert [number_of(path) for path in paths] == list(range(5, 12))
    steps = check_same(tmp_path / "models", run.checkpoints_path, dtype)
    assert steps == list(range(6, 13)), "the first step says how long a step takes"
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["versions_published"] == 11 and summary["publishing_seconds"] > 0


def test_what_servers_were_rolled_back_to_is_kept(data, tmp_path):
    models = tmp_path / "models"

    def before(step):
        if step == 7:
            roll_back(models, 3)
        if step == 11:
            go_forward(models)

    more = ["train.publish_compact_every=2", "train.publish_keep_seconds=0", "train.steps=14"]
    seen = []
    run = train(
        data,
        tmp_path,
        *more,
        before=lambda step: (before(step), seen.append(numbered(models))),
    )
    assert seen[9][:3] == [1, 2, 3], "with its base, and all that came after"
    assert number_of(versions(models)[0]) > 3
    check_same(models, run.checkpoints_path)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_ids_that_have_rows_are_those_of_an_export_of_the_step(data, tmp_path, dtype):
    more = [f"train.publish_dtype={dtype}", "train.publish_compact_every=3", *RAW_IDS]
    run = train(data, tmp_path, *more)
    steps = check_same(tmp_path / "models", run.checkpoints_path, dtype)
    assert steps == list(range(2, 13))
    with pytest.raises(Stopped):
        train(data, tmp_path / "again", *more, last=8)
    again = train(data, tmp_path / "again", *more)
    assert check_same(tmp_path / "again" / "models", again.checkpoints_path, dtype)[-1] == 12


def test_narrow_rows_and_another_optimizer(data, tmp_path):
    more = [
        "embedding.dtype=bfloat16",
        "embedding.optimizer.name=rowwise_adagrad",
        "embedding.optimizer.lr=.1",
    ]
    run = train(data, tmp_path, *more, "train.steps=5")
    assert check_same(tmp_path / "models", run.checkpoints_path) == [2, 3, 4, 5]


def test_a_run_that_goes_on_begins_at_what_it_published_where_that_is_known(data, tmp_path):
    """From an earlier checkpoint: the same steps again, and then a delta on the last version.

    It has the rows of all steps since the checkpoint.
    """
    with pytest.raises(Stopped):
        train(data, tmp_path, last=8)
    for step in (6, 7, 8):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    before = files_below(tmp_path / "models")
    last = len(versions(tmp_path / "models"))
    run = train(data, tmp_path)
    assert before.items() <= files_below(tmp_path / "models").items()
    steps = check_same(tmp_path / "models", run.checkpoints_path)
    assert steps == sorted(steps) and steps[-1] == 12
    fresh = versions(tmp_path / "models")[last:]
    assert fresh and all(is_delta(path) for path in fresh)


@pytest.mark.parametrize("what", ["a later checkpoint", "another's number", "removed", "no record"])
def test_otherwise_the_next_one_is_whole(data, tmp_path, what):
    with pytest.raises(Stopped):
        train(data, tmp_path, last=6)
    models = tmp_path / "models"
    last = number_of(versions(models)[-1])
    more = []
    if what == "a later checkpoint":  # whose rows nobody marked
        more = ["train.publish_every_seconds=1e9", "train.steps=9"]
        with pytest.raises(Stopped):
            train(data, tmp_path, *more, last=8)
    elif what == "another's number":
        shutil.copytree(models / str(last), models / "40")
        last = 40
    elif what == "removed":
        shutil.rmtree(models / str(last))
    else:
        (tmp_path / "run" / "published.json").unlink()
    run = train(data, tmp_path)
    fresh = [path for path in versions(models) if number_of(path) > last - (what == "removed")]
    assert is_export(fresh[0]) and not any(is_export(path) for path in fresh[1:])
    assert check_same(models, run.checkpoints_path)[-1] == 12


def test_a_base_that_goes_meanwhile_is_named_and_the_next_version_is_whole(data, tmp_path, caplog):
    models = tmp_path / "models"

    def remove(step):
        if step == 6:
            shutil.rmtree(models)

    run = train(data, tmp_path, before=remove)
    (message,) = [text for text in caplog.messages if "no new version" in text]
    assert "at which the next delta was to begin" in message
    assert [is_export(path) for path in versions(models)][:2] == [True, False]
    assert check_same(models, run.checkpoints_path)[-1] == 12


def test_training_goes_on_when_the_disk_refuses_and_the_next_one_has_all_rows(
    data, tmp_path, caplog
):
    models = tmp_path / "models"

    def fill(step):
        if step == 5:
            models.rename(tmp_path / "aside")
            models.write_text("no folder")
        if step == 8:
            models.unlink()
            (tmp_path / "aside").rename(models)

    run = train(data, tmp_path, before=fill)
    messages = [text for text in caplog.messages if "no new version at step" in text]
    assert 2 <= len(messages) <= 4
    assert check_same(models, run.checkpoints_path)[-1] == 12
    assert not list(models.glob(".*"))


def test_without_memory_for_all_rows_the_first_version_waits_for_nothing_else(
    data, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(shards, "free_memory", lambda: 20_000)
    with caplog.at_level(logging.INFO, "pibroch"):
        run = train(data, tmp_path, "train.batch_size=3")
    assert sum("training waits for the new version" in text for text in caplog.messages) == 1
    assert "no new version" not in caplog.text
    assert check_same(tmp_path / "models", run.checkpoints_path) == list(range(2, 13))


def test_what_a_killed_run_left_goes_and_what_others_left_stays(data, tmp_path):
    models = tmp_path / "models"
    (models / ".3.unfinished").mkdir(parents=True)
    (models / "7").mkdir()
    (models / "notes").mkdir()
    train(data, tmp_path, "train.publish_compact_every=1", "train.publish_keep_seconds=0")
    names = {path.name for path in models.iterdir()}
    assert ".3.unfinished" not in names and {"7", "notes"} <= names
    assert number_of(versions(models)[1]) > 8, "its own older ones are gone"
    assert checksum_in(versions(models)[-1]) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["train.average=0.9"],
            r"train\.average = 0\.9.*averages of rows.*export checkpoints",
        ),
        (["train.publish_to={data}/models"], r"lies in .*choose another train\.publish_to"),
        (["train.publish_to={run}"], r"contains .*checkpoints"),
    ],
)
def test_refusals(data, tmp_path, settings, message):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    places = {"data": data, "run": tmp_path / "run"}
    with pytest.raises(ConfigError, match=message):
        train(data, tmp_path, *(each.format(**places) for each in settings))
