"""Compiled packages: a C++ program that knows nothing of pibroch gives the scores of `predict`."""

import csv
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pibroch as pb
from grids import some
from pibroch.data import EncodedDataset, Loader
from pibroch.errors import CheckpointError, ConfigError, MissingDependencyError, StorageError
from pibroch.serve.aot import export_aot, refuse_aot, traced
from pibroch.serve.export import export_checkpoint
from pibroch.serve.inputs import encoded_tensors
from pibroch.serve.whole_model import Rows, WholeModel
from raw_clicks import RAW_IDS, prepared, raw_rows
from several_labels import prepared as prepared_labels
from small_run import make_config, run_command, train_here

EXAMPLE = Path(__file__).parents[3] / "examples" / "aot"
BATCH_SIZES = (1, 2, 3, 16, 17, 100, 450)
"""Of which 3 alone was traced."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example, built as its CMakeLists.txt says."""
    for needed in ("cmake", "g++"):
        if shutil.which(needed) is None:
            pytest.skip(f"the example in C++ is built by {needed}, which is not installed")
    build = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for words in (["cmake", "-S", EXAMPLE, "-B", build, prefix], ["cmake", "--build", build]):
        made = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
        assert made.returncode == 0, made.stdout + made.stderr
    return build / "score"


def scored(program, package, tensors, folder):
    """What the program prints for a batch, ``[B]`` or ``[B, T]``."""
    torch.save(list(tensors.values()), folder / "inputs.pt")
    ran = subprocess.run(
        [program, package, folder / "inputs.pt"], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    lines = [list(map(float, line.split(","))) for line in ran.stdout.splitlines()]
    return np.array(lines).squeeze(), ran.stderr


def predicted(run, data, folder):
    """What ``pibroch predict`` writes for the test split."""
    out = folder / "scores.csv"
    ran = run_command("predict", "--checkpoint", run, "--data", data, "--out", out)
    assert ran.returncode == 0, ran.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name.startswith("score")]
    return np.array([[float(row[name]) for name in names] for row in rows]).squeeze()


def cases(name, folder):
    """A dataset and the settings of a run on it."""
    if name == "mmoe":
        return prepared_labels(folder, count=5000), ["tasks.seconds.loss={name='mse'}"]
    if name == "deepfm":
        rows = "{name='hashed', capacity=30, admit_after=2}"
        options = [f"embedding.tables.{table}.rows={rows}" for table in ("user", "tags")]
        return prepared(folder / "data", raw_rows(3000), text=RAW_IDS), options
    options = ["model={histories={tags='city'}, max_length=2, attention_heads=2}"]
    return prepared(folder / "data", raw_rows(3000)), options * (name == "sasrec")


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["dcnv2", "sasrec", "deepfm", "mmoe"], 0, 2))
def test_a_program_in_cpp_gives_the_scores_of_predict(program, tmp_path, name):
    data, options = cases(name, tmp_path)
    run, _ = train_here(
        make_config(data, f"model.name={name}", "train.steps=20", *options), tmp_path / "run"
    )
    package = tmp_path / "new" / "ctr.pt2"
    ran = run_command("export", run.path, "--aot", package)
    assert ran.returncode == 0, ran.stderr
    assert "and the layers, " in ran.stdout and "Warning" not in ran.stderr, ran
    assert [each.name for each in package.parent.iterdir()] == ["ctr.pt2"]
    predictor = pb.Predictor.open(run.path)
    wanted = predicted(run.path, data, tmp_path)
    split = EncodedDataset.open(data).split("test")
    assert len(split) >= BATCH_SIZES[-1]
    for size in BATCH_SIZES:
        batch = next(iter(Loader(split, size)))
        tensors = encoded_tensors(predictor.schema, batch)
        scores, said = scored(program, package, tensors, tmp_path)
        assert np.abs(scores - wanted[:size].squeeze()).max() < 1e-6
        assert f"version {predictor.version}\n" == said
    if name == "dcnv2":
        none = {key: tensor[: 0 if key == "tags.values" else 1] for key, tensor in tensors.items()}
        none["tags.lengths"] = torch.zeros(1, dtype=torch.int64)
        scores, _ = scored(program, package, none, tmp_path)
        batch = predictor.encode([dict.fromkeys(predictor.columns)])
        missing, _ = scored(program, package, encoded_tensors(predictor.schema, batch), tmp_path)
        assert abs(missing - predictor(batch).item()) < 1e-6 < abs(missing - scores)
        torch.save([*none.values()][:-1], tmp_path / "inputs.pt")
        refused = subprocess.run(
            [program, package, tmp_path / "inputs.pt"], capture_output=True, text=True
        )
        assert refused.returncode == 1 and not refused.stdout
        none["ids"] = none["ids"] + 1000
        torch.save([*none.values()], tmp_path / "inputs.pt")
        refused = subprocess.run(
            [program, package, tmp_path / "inputs.pt"], capture_output=True, text=True
        )
        assert refused.returncode == 1 and "got an id of user outside" in refused.stderr


def test_what_cannot_be_written_is_refused_before_anything_is_compiled(
    clicks, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"which exists; need a new file; do: pass --overwrite"):
        (tmp_path / "there.pt2").touch()
        refuse_aot(tmp_path / "there.pt2", False)
    refuse_aot(tmp_path / "there.pt2", True)
    with pytest.raises(ConfigError, match=r"ends in \.pt2"):
        refuse_aot(tmp_path / "ctr.so", False)
    out = tmp_path / "ctr.pt2"
    with pytest.raises(
        ConfigError, match=r"tables are \d+\.\d kB, for --aot; need at most 1\.0 kB"
    ):
        export_aot(clicks.run, out, max_bytes=1000)
    export_checkpoint(clicks.run, tmp_path / "export")
    with pytest.raises(CheckpointError, match="an export, for --aot; need a checkpoint"):
        export_aot(tmp_path / "export", out)
    with pytest.raises(StorageError, match="a disk with room for the package"):
        export_aot(clicks.run, tmp_path / "there.pt2" / "ctr.pt2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependencyError, match=r"compiler no-such-compiler.*apt-get install"):
        export_aot(clicks.run, out)
    assert not out.exists()


def test_layers_that_cannot_be_traced_are_refused_in_words(clicks):
    class Branching(nn.Module):
        def forward(self, dense, embedded):
            return dense.sum(1) if embedded.sum() > 0 else embedded[:, 0, 0]

    schema = pb.Predictor.open(clicks.run).schema
    tables = {name: Rows(0, 9, None, 9) for name in schema.readers}
    model = WholeModel(schema, Branching(), torch.zeros(10, 4), tables)
    with pytest.raises(ConfigError, match=r"a model Branching that torch\.export cannot trace"):
        traced(model)


def test_a_program_is_of_any_number_of_samples_and_ids(clicks):
    schema = pb.Predictor.open(clicks.run).schema
    tables = {name: Rows(0, 9, None, 9) for name in schema.readers}

    class Sum(nn.Module):
        def forward(self, dense, embedded):
            return dense.sum(1) + embedded.sum((1, 2))

    weights = torch.arange(40.0).view(10, 4)
    module = traced(WholeModel(schema, Sum(), weights, tables)).module()
    batch = next(iter(Loader(EncodedDataset.open(clicks.data).split("test"), 8)))
    for size in (1, 2, 5):
        ids = torch.zeros(size, 4, dtype=torch.int64)
        lengths = torch.ones(size, dtype=torch.int64)
        dense = batch.dense[:size]
        _, logits = module(dense, ids, torch.full((size,), 8), lengths)
        wanted = dense.sum(1) + 4 * weights[0].sum() + weights[8].sum()
        torch.testing.assert_close(logits, wanted)
