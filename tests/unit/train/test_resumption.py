"""What a run that goes on may be given, what it refuses and what it says.

Damaged checkpoints and lost files.
"""

import json
import logging
import shutil

import pytest
import torch

from pibroch.cli import train as train_command
from pibroch.collectives.rounding import processor
from pibroch.data import EncodedDataset
from pibroch.errors import CheckpointError, ConfigError, DamagedCheckpointError
from pibroch.serve.predictor import Predictor
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.dense import load_dense_weights, tensors_in
from pibroch.state.manifest import MANIFEST
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import build_session
from small_run import files_below, make_config, make_dataset, train_here

LENGTH = "train.steps=12"
KEPT = ["train.checkpoint_every=4", "train.evaluate_every=6", "train.keep=9"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run of twelve steps with checkpoints 4, 6, 8 and 12.

    Tests copy it before they change it.
    """
    run, result = train_here(
        make_config(data, LENGTH, *KEPT), tmp_path_factory.mktemp("trained") / "run"
    )
    assert CheckpointFolder(run.checkpoints_path, 9).steps()[0] == 4 and result.summary.steps == 12
    return run


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return RunDirectory(shutil.copytree(trained.path, tmp_path / "run", symlinks=True))


def longer(data, *changes):
    return make_config(data, "train.steps=14", *KEPT, *changes)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "got", "need"),
    [
        (["model.name=deepfm"], "`model.name = 'deepfm'`", "`model.name = 'dlrm'`"),
        (["model.dim=8"], "`model.dim = 8`", "`model.dim = 4`"),
        (["model.top=[32]"], "`model.top = [32]`", "`model.top = [16]`"),
        (["model.activation=gelu"], "`model.activation = 'gelu'`", "`model.activation = 'relu'`"),
        (["train.batch_size=50"], "`train.batch_size = 50`", "`train.batch_size = 100`"),
        (
            ["seed=4", "train.monitor=logloss"],
            "`seed = 4`, `train.monitor = 'logloss'`",
            "`train.monitor = 'auc'`",
        ),
        (
            ["optimizer={name='sgd', lr=0.1}"],
            "`optimizer.name = 'sgd'`",
            "`optimizer.name = 'adam'`",
        ),
        (
            ["embedding.optimizer={name='sgd', lr=0.1}"],
            "`embedding.optimizer.name = 'sgd'`",
            "'adam'",
        ),
        (["train.average=0.9"], "`train.average = 0.9`", "no `train.average`"),
    ],
)
def test_what_a_run_keeps_to_its_end_is_refused_by_name(data, run, caplog, changes, got, need):
    before = files_below(run.path)
    with pytest.raises(CheckpointError) as refused:
        train_here(longer(data, *changes, "schedule.warmup_steps=1"), run.path)
    assert not [record for record in caplog.records if "in place of" in record.getMessage()], (
        "nothing goes on"
    )
    assert (
        got in refused.value.got
        and need in refused.value.need
        and "from step 12" in refused.value.got
    )
    assert {name for name in files_below(run.path) if "step-" in name} == {
        name for name in before if "step-" in name
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.lr=0.02"], "`optimizer.lr = 0.02` in place of `optimizer.lr = 0.01`"),
        (
            ["model.dropout=0.1"],
            "from step 13 on: `model.dropout = 0.1` in place of `model.dropout = 0.2`",
        ),
        (["train.log_every=2", "train.early_stop_patience=9", "embedding.exchange=local"], None),
    ],
)
def test_what_changes_the_numbers_is_said_and_what_does_not_is_not(
    data, run, caplog, changes, message
):
    with caplog.at_level(logging.WARNING, "pibroch"):
        assert train_here(longer(data, *changes), run.path)[1].summary.steps == 14
    assert (message in caplog.text) if message else not caplog.records


def test_another_length_is_said_where_the_schedule_spans_the_run(data, tmp_path, caplog):
    cosine = ["schedule.name=cosine", *KEPT]
    train_here(make_config(data, "train.steps=4", *cosine), tmp_path / "run")
    with caplog.at_level(logging.WARNING, "pibroch"):
        train_here(make_config(data, "train.steps=5", *cosine), tmp_path / "run")
    assert "`train.steps = 5` in place of `train.steps = 4`" in caplog.text


def test_other_versions_processors_threads_and_ranks_are_said(data, run, caplog):
    began = run.read_json("versions.json")
    assert began["processor"] == processor()
    assert (began["threads"], began["ranks"], began["torch"]) == (1, 1, torch.__version__)
    other = {"torch": "2.0.0", "pibroch": "0.0.1", "processor": "m68k, torch DEFAULT"}
    run.write_json("versions.json", began | other)
    with caplog.at_level(logging.WARNING, "pibroch"):
        train_here(longer(data, "train.threads=2"), run.path)
    before = "pibroch 0.0.1, torch 2.0.0, processor m68k, torch DEFAULT, 1 thread"
    assert f"began with {before} and goes on with pibroch" in caplog.text
    assert run.read_json("versions.json")["torch"] == "2.0.0", "what it began with stays"


def test_resuming_a_finished_run_leaves_it_as_it_is(data, trained, run, caplog):
    before = files_below(run.path)
    with caplog.at_level(logging.INFO, "pibroch"):
        _, result = train_here(make_config(data, LENGTH, *KEPT), run.path)
    assert "the run is finished (12 steps)" in caplog.text
    assert files_below(run.path) == before
    assert (
        result.summary.samples_per_second == run.read_json("summary.json")["samples_per_second"] > 0
    )
    assert 0.5 < result.best_possible_auc < 1


def test_a_run_whose_end_was_cut_off_ends(data, run):
    summary = run.read_json("summary.json")
    (run.path / "summary.json").unlink()
    _, result = train_here(make_config(data, LENGTH, *KEPT), run.path)
    assert (result.summary.steps, result.summary.auc) == (12, summary["auc"])
    run.write_json("summary.json", summary | {"steps": 9})  # of before it was prolonged
    assert train_here(make_config(data, LENGTH, *KEPT), run.path)[1].summary.steps == 12


@pytest.mark.parametrize(
    "how", ["a byte", "the manifest", "no manifest", "a lost file", "cut short"]
)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(data, trained, run, caplog, how):
    newest = CheckpointFolder(run.checkpoints_path, 9).path(12)
    table = newest / "tables" / "C7.safetensors"
    if how == "a byte":
        damage(table)
    elif how == "cut short":
        table.write_bytes(table.read_bytes()[:-3])
    elif how == "a lost file":
        table.unlink()
    elif how == "the manifest":
        damage(newest / MANIFEST)
    else:
        (newest / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING, "pibroch"):
        train_here(make_config(data, LENGTH, *KEPT), run.path)
    named = "manifest.json" if "manifest" in how else "C7.safetensors"
    assert "the checkpoint of step 12 is damaged" in caplog.text and named in caplog.text
    assert "set aside as step-00000012.damaged; the run goes on from step 8" in caplog.text
    assert (run.checkpoints_path / "step-00000012.damaged").is_dir()
    undisturbed = files_below(trained.checkpoints_path / "step-00000012")
    assert files_below(newest) == undisturbed, "written again, to the same bytes"


def test_other_tables_are_refused_by_name_and_nothing_is_said_to_go_on(data, run, tmp_path, caplog):
    wide = make_dataset(tmp_path / "wide", num_samples=1000, max_table_rows=41)
    with pytest.raises(CheckpointError, match=r"table 'C\d+' with 42 rows x 4"):
        train_here(longer(wide, "optimizer.lr=0.5"), run.path)
    assert not [record for record in caplog.records if "in place of" in record.getMessage()]


def test_dense_layers_of_another_version_are_no_crash(data, run):
    """Their names or shapes change with the code, not with a setting."""
    session = build_session(run.config(), EncodedDataset.open(data))
    session.model.add_module("newer", torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"dense layers that .*newer"):
        load_dense_weights(tensors_in(CheckpointFolder(run.checkpoints_path, 9).latest()), session)


def test_several_damaged_ones_are_all_named_and_all_damaged_is_an_error(data, run, caplog):
    folder = CheckpointFolder(run.checkpoints_path, 9)
    for step in (12, 8):
        damage(folder.path(step) / "dense.safetensors")
    with caplog.at_level(logging.WARNING, "pibroch"):
        train_here(make_config(data, LENGTH, *KEPT), run.path)
    assert "step 12 is damaged" in caplog.text and "step 8 is damaged" in caplog.text
    steps = folder.steps()
    for step in steps:
        damage(folder.path(step) / "dense.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"of step 12 .*dense\.safetensors.*, and {len(steps) - 1} older"
    ):
        train_here(make_config(data, LENGTH, *KEPT), run.path)
    assert folder.steps() == steps, "nothing is set aside then"


def test_a_checkpoint_to_predict_with_never_gives_way_to_another(run):
    folder = CheckpointFolder(run.checkpoints_path, 9)
    damage(folder.best() / "dense.safetensors")
    for path in (run.path, folder.best()):
        with pytest.raises(DamagedCheckpointError, match=r"dense\.safetensors"):
            Predictor.open(path)


def test_a_lost_configuration_is_taken_from_the_newest_checkpoint(data, run, caplog):
    config = run.config()
    (run.path / "config.toml").unlink()
    damage(run.checkpoints_path / "step-00000012" / MANIFEST)
    with caplog.at_level(logging.WARNING, "pibroch"):
        result, path = train_command._begin(None, ["train.steps=13"], run.path, resume=True)
    assert path == run.path and result == config.model_copy(update={"train": result.train})
    assert result.train.steps == 13 and "no config.toml" in caplog.text
    with pytest.raises(ConfigError, match="pass --resume"):
        train_command._begin(None, [], run.path, resume=False)


def test_a_folder_that_holds_no_run_is_not_gone_on_with(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"neither config\.toml nor") as refused:
        train_command._begin(None, [], tmp_path, resume=True)
    assert "--resume" not in refused.value.do
    with pytest.raises(ConfigError, match="in which no run was begun"):
        train_command._begin(None, [], tmp_path / "new", resume=True)
    begun = train_command._begin("synthetic_small", [], tmp_path / "new", resume=True)
    assert begun[1] == tmp_path / "new"


def test_a_damaged_file_of_versions_is_no_crash(data, run, caplog):
    (run.path / "versions.json").write_text("{")
    train_here(longer(data), run.path)
    assert (
        "is damaged" in caplog.text
        and json.loads((run.path / "versions.json").read_text())["threads"] == 1
    )
