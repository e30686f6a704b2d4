"""``pibroch checkpoint`` as its own process."""

import pytest
import torch

from pibroch.cli.checkpoint import System, convert_command, verify_command
from pibroch.config import to_toml
from pibroch.data import EncodedDataset
from pibroch.errors import CheckpointError, ConfigError
from pibroch.score.checkpoint import evaluate_checkpoint
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import make_config, run_command, train_here


@pytest.fixture(scope="module")
def config(data):
    return make_config(
        data,
        "train.steps=14",
        "train.full_checkpoint_every=2",
        "train.evaluate_every=14",
        "model.batch_norm=false",
    )


@pytest.fixture
def run(config, tmp_path):
    """A run whose last checkpoint is an incremental one."""
    return train_here(config, tmp_path / "run")[0]


def test_inspect(run):
    ended = run_command("checkpoint", "inspect", CheckpointFolder(run.checkpoints_path, 2).latest())
    assert ended.returncode == 0, ended.stderr
    for text in (
        "step 14, incremental, 1 after the last full one",
        "C26",
        "exp_avg[4]",
        "1 + 1 changed",
    ):
        assert text in ended.stdout
    assert "learning rates: dense 0.01, embedding 0.01" in ended.stdout
    assert "model dlrm, sparse optimizer adam" in ended.stdout


def test_verify_names_each_damaged_or_missing_file(run):
    latest = CheckpointFolder(run.checkpoints_path, 2).latest()
    whole = run_command("checkpoint", "verify", latest)
    assert whole.returncode == 0 and "are as they were saved" in whole.stdout
    (latest / "tables" / "C3.safetensors").unlink()
    (delta,) = (latest / "tables").glob("C5@step-*.safetensors")
    dense = latest / "dense.safetensors"
    delta.write_bytes(delta.read_bytes()[:-1])
    content = bytearray(dense.read_bytes())
    content[-1] ^= 1
    dense.write_bytes(content)
    damaged = run_command("checkpoint", "verify", latest)
    assert damaged.returncode == 2 and damaged.stdout == "" and "Traceback" not in damaged.stderr
    assert "3 of " in damaged.stderr
    for name in ("C3.safetensors", delta.name, "dense.safetensors"):
        assert name in damaged.stderr
    (latest / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest\.json, damaged"):
        verify_command(latest)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        verify_command(latest.parent.parent.parent)


def test_convert_there_and_back(run, config, tmp_path):
    exported = run_command("checkpoint", "convert", run.path, tmp_path / "m.pt", "--to", "torchrec")
    assert exported.returncode == 0, exported.stderr
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert "sparse_arch.embedding_bag_collection.embedding_bags.t_C1.weight" in state
    assert "over_arch.model.1.weight" in state
    (tmp_path / "r.toml").write_text(to_toml(config.model_dump()))
    arguments = [
        tmp_path / "m.pt",
        tmp_path / "back",
        "--from",
        "torchrec",
        "--recipe",
        tmp_path / "r.toml",
    ]
    imported = run_command("checkpoint", "convert", *arguments)
    assert imported.returncode == 0, imported.stderr
    dataset = EncodedDataset.open(config.data.dir)
    first, second = (
        evaluate_checkpoint(path, dataset, "test") for path in (run.path, tmp_path / "back")
    )
    assert first == second


@pytest.mark.parametrize(
    "options", [{}, {"to": System.DLRM, "from_": System.DLRM}, {"from_": System.DLRM}]
)
def test_wrong_usage_of_convert(tmp_path, options):
    with pytest.raises(ConfigError, match=r"--from"):
        convert_command(tmp_path / "a", tmp_path / "b", **options)
