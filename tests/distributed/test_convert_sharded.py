"""Models whose tables were cut over ranks by others are converted.

From DCP's folders, and from the files of all ranks.
"""

import os
import pickle
import shutil

import convert_cases as cases
import numpy as np
import pytest
import torch

from pibroch.data import EncodedDataset
from pibroch.errors import CheckpointError
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.parts import WEIGHT
from pibroch.state.tensor_file import TensorFile
from pibroch.train.convert import export_checkpoint, import_checkpoint
from pibroch.train.convert.sources import read_source
from pibroch.train.run_directory import RunDirectory
from small_run import make_config, run_command, train_here

PLAIN = ("model.batch_norm=false", "model.top=[16, 8]", "train.steps=3")


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    """A trained run and its weights under TorchRec's names."""
    folder = tmp_path_factory.mktemp("model")
    run, _ = train_here(make_config(data, *PLAIN), folder / "run")
    export_checkpoint(find_checkpoint(run.path), folder / "model.pt", "torchrec")
    return run, folder / "model.pt"


@pytest.mark.parametrize("kind", ["rows", "columns", "dtensor"])
def test_tables_cut_over_ranks_are_whole_again(worlds, model, tmp_path, kind):
    expected = torch.load(model[1], weights_only=True)
    worlds(2).run(cases.write, model[1], tmp_path, kind)
    for folder in sorted(tmp_path.iterdir()):
        actual = read_source(folder)
        assert actual.keys() == {f"app.model.{name}" for name in expected}
        for name, tensor in expected.items():
            assert torch.equal(actual[f"app.model.{name}"], tensor), name


def test_convert_from_dcp_and_from_files_of_ranks(worlds, data, model, tmp_path):
    worlds(2).run(cases.write, model[1], tmp_path, "rows")
    recipe = model[0].path / "config.toml"
    ended = run_command(
        "checkpoint",
        "convert",
        tmp_path / "dcp",
        tmp_path / "run",
        "--from",
        "torchrec",
        "--recipe",
        recipe,
    )
    assert ended.returncode == 0, ended.stderr
    config = make_config(data, *PLAIN)
    files = RunDirectory(tmp_path / "other")
    import_checkpoint(tmp_path / "files", files, "torchrec", config, EncodedDataset.open(data))
    for run in (tmp_path / "run", files.path):
        ours = find_checkpoint(run)
        other = find_checkpoint(model[0].path)
        for file in ("tables/C1.safetensors", "tables/C20.safetensors"):
            weights = []
            for folder in (ours, other):
                with TensorFile(folder, file) as tensors:
                    rows = range(tensors.shape(WEIGHT)[0])
                    weights.append(
                        np.concatenate([chunk.copy() for _, chunk in tensors.chunks(WEIGHT, rows)])
                    )
            assert np.array_equal(*weights)
        assert (ours / "dense.safetensors").read_bytes() == (
            other / "dense.safetensors"
        ).read_bytes()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/never",)


def test_what_is_not_whole_or_not_plain_is_refused(worlds, data, model, tmp_path):
    worlds(2).run(cases.write, model[1], tmp_path, "rows")
    files = tmp_path / "files"
    folder = tmp_path / "dcp"
    with pytest.raises(
        CheckpointError,
        match=r"of the .* numbers of .* cut over ranks.*folder with the file of each rank",
    ):
        read_source(files / "rank1.pt")
    shutil.copy(folder / ".metadata", tmp_path / "index")
    for content in (Evil(), [1], {"x": os.mkdir}, np.zeros(3)):
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match="which cannot be read: an index"):
            read_source(folder)
    assert not os.path.exists("/tmp/never")
    shutil.copy(tmp_path / "index", folder / ".metadata")
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="which cannot be read"):
        read_source(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"a folder without \.metadata"):
        read_source(tmp_path / "empty")
    state = torch.load(model[1], weights_only=True)
    torch.save({"model": state, "ema": state}, tmp_path / "two.pt")
    config = make_config(data, *PLAIN)
    with pytest.raises(
        CheckpointError, match=r"tables under 'ema\.' and 'model\.'; need those of one model"
    ):
        import_checkpoint(
            tmp_path / "two.pt",
            RunDirectory(tmp_path / "r"),
            "torchrec",
            config,
            EncodedDataset.open(data),
        )
