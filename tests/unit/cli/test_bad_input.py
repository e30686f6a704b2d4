"""Bad input through the real command line: what was got, what is needed, what to do; exit code 2.

No traceback.
"""

import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from pibroch.cli import train as train_command
from pibroch.collectives.world import World
from pibroch.config import to_toml
from pibroch.data import EncodedDataset
from pibroch.errors import ConfigError, StorageError
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.train.run_directory import RunDirectory
from small_run import files_below, make_config, make_dataset, run_command, run_installed, train_here

DISK_BYTES = 1_200_000
FILE_BYTES = 4_000  # more than the metrics of four steps, less than the dense layers


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run; tests copy it before they damage it."""
    run, _ = train_here(
        make_config(data, "train.steps=2"), tmp_path_factory.mktemp("trained") / "run"
    )
    return run.path


def refused(*arguments, exit_code=2, run=run_command, **options):
    """What the command line says when it refuses."""
    ended = run(*arguments, **options)
    assert ended.returncode == exit_code, ended.stderr
    assert "Traceback" not in ended.stderr and ended.stdout == ""
    message = ended.stderr[ended.stderr.index("got:") :]
    assert [line.split(":")[0] for line in message.splitlines()] == ["got", "need", "do"], message
    return message


def test_an_unknown_recipe_key(tmp_path):
    (tmp_path / "r.toml").write_text('extends = "synthetic_small"\n[train]\nbatch_sise = 7\n')
    message = refused("train", tmp_path / "r.toml")
    assert (
        "unknown key `train.batch_sise`" in message
        and "did you mean `train.batch_size`?" in message
    )


def test_dim_0():
    assert "`model.dim = 0`" in refused("train", "--set", "model.dim=0")


def test_a_missing_dataset(tmp_path):
    message = refused("train", "criteo_kaggle_sample", "--run-dir", "run", cwd=tmp_path)
    assert "data/criteo_kaggle_sample" in message and "pibroch data prepare criteo" in message
    assert not list(tmp_path.iterdir())


def test_a_corrupted_byte(trained, data, tmp_path):
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    table = tmp_path / "run" / "checkpoints" / "step-00000002" / "tables" / "C7.safetensors"
    content = bytearray(table.read_bytes())
    content[-5] ^= 4
    table.write_bytes(content)
    for arguments in (
        ["evaluate", "--checkpoint", tmp_path / "run", "--data", data],
        ["train", "--run-dir", tmp_path / "run", "--resume", "--set", "train.steps=9"],
    ):
        assert "C7.safetensors" in refused(*arguments)


def test_a_checkpoint_of_another_schema(trained, tmp_path):
    other = make_dataset(tmp_path / "other", num_samples=500, max_table_rows=30)
    message = refused("evaluate", "--checkpoint", trained, "--data", other)
    assert "table 'C" in message and "42 rows x 4" in message and "32 rows x 4" in message


def test_an_id_out_of_range(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    ids = tmp_path / "data" / "train" / "ids.i32"
    ids.write_bytes((10**6).to_bytes(4, "little") + ids.read_bytes()[4:])
    config = tmp_path / "r.toml"
    config.write_text(to_toml(make_config(tmp_path / "data").model_dump()))
    message = refused("train", config, "--run-dir", tmp_path / "run")
    assert "id 1000000 for feature 'C1' in sample" in message


@pytest.mark.parametrize("how", ["tmpfs", "file size limit"])
def test_a_full_disk_keeps_the_previous_checkpoint(trained, data, tmp_path, how):
    folder = tmp_path / "disk"
    folder.mkdir()
    limits = {}
    if how == "tmpfs":
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder],
            capture_output=True,
            check=False,
        )
        if mounted.returncode != 0:
            pytest.skip("mounting a small disk needs root")
    else:
        limits["preexec_fn"] = lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES)
        )
        limits["run"] = run_installed
    try:
        run = folder / "run"
        shutil.copytree(trained, run, symlinks=True)
        if how == "tmpfs":
            fill = os.statvfs(folder)
            (folder / "ballast").write_bytes(bytes(fill.f_bavail * fill.f_frsize - 150_000))
        resume = ["train", "--run-dir", run, "--resume", "--set", "train.steps=4"]
        message = refused(*resume, exit_code=StorageError.exit_code, **limits)
        assert "--resume" in message
        checkpoints = CheckpointFolder(run / "checkpoints", keep=2)
        assert checkpoints.steps() == [2] and not list(checkpoints.folder.glob(".*"))
        evaluate_checkpoint(checkpoints.path(2), EncodedDataset.open(data), "test")
    finally:
        if how == "tmpfs":
            subprocess.run(["umount", folder], check=True)


def test_usage_errors_exit_with_2(tmp_path):
    assert run_command("train", "--no-such-option").returncode == 2
    assert "--run-dir" in refused("train", "--resume")
    typo = tmp_path / "typo"
    assert "in which no run was begun" in refused("train", "--resume", "--run-dir", typo)
    assert not typo.exists()
    assert run_command("no-such-command").returncode == 2
    assert "holds no run" in refused("report", tmp_path)


def test_debug_shows_the_traceback():
    ended = run_command("train", "--set", "model.dim=0", "--debug")
    assert ended.returncode == 2 and "Traceback" in ended.stderr and "got:" in ended.stderr


def test_a_directory_in_which_another_process_trains(data, trained, tmp_path):
    run = RunDirectory(Path(shutil.copytree(trained, tmp_path / "run", symlinks=True)))
    run.claim()
    before = files_below(run.path)
    message = refused("train", "--run-dir", run.path, "--resume")
    assert f"in which process {os.getpid()} on" in message and "wait until it has ended" in message
    assert files_below(run.path) == before


def test_a_run_that_began_while_this_one_looked_is_left_alone(data, tmp_path):
    """Two commands may find the same folder empty.

    The second to claim it finds the first one's run.
    """
    config = make_config(data)
    run = RunDirectory(tmp_path / "run")
    run.claim()
    run.checkpoints_path.mkdir()
    (run.path / ".config.toml.7.tmp").touch()
    assert run.must_be_new() is run, "all that a killed command leaves that was to begin one"
    run.create(config)
    assert not list(run.path.glob(".*.tmp"))
    with pytest.raises(ConfigError, match="is not empty"):
        train_command._open(config, run, World.alone(), resume=False)
