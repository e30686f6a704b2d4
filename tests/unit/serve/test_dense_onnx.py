import json

import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.config import model_zoo
from pibroch.data import EncodedDataset, Loader
from pibroch.data.schema import CategoricalFeature, Schema
from pibroch.errors import ConfigError, MissingDependencyError, StorageError
from pibroch.models import build_model
from pibroch.serve.dense_onnx import DensePart, export_onnx, write_onnx
from pibroch.serve.export import ExportOptions, export_checkpoint
from small_run import make_config, run_command, train_here


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def opened(onnxruntime, path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("model", ["dlrm", "dcnv2", *(spec.name for spec in model_zoo.SPECS)])
def test_scores_are_the_predictors(onnxruntime, data, tmp_path, model):
    run, _ = train_here(
        make_config(data, f"model.name={model}", "train.steps=5", "train.average=0.9"),
        tmp_path / "run",
    )
    export_onnx(run.path, tmp_path / "dense.onnx")
    session = opened(onnxruntime, tmp_path / "dense.onnx")
    predictor = pb.Predictor.open(run.path)
    about = session.get_modelmeta().custom_metadata_map
    assert about["pibroch.version"] == predictor.version
    assert tuple(json.loads(about["pibroch.features"])) == predictor.features
    sizes = set()
    for batch in Loader(EncodedDataset.open(data).split("test"), 64):
        given = {"dense": batch.dense.numpy(), "embedding": predictor.embed(batch).numpy()}
        score, logit = session.run(["score", "logit"], given)
        assert np.abs(score - predictor(batch).numpy()).max() < 1e-5
        assert np.abs(logit - predictor.logits(batch).numpy()).max() < 1e-4
        sizes.add(len(score))
    assert len(sizes) == 2


def test_the_command_takes_an_export(onnxruntime, clicks, tmp_path):
    export_checkpoint(clicks.run, tmp_path / "ctr", ExportOptions("int8"))
    ran = run_command("export", tmp_path / "ctr", "--onnx", tmp_path / "new" / "ctr.onnx")
    assert ran.returncode == 0, ran.stderr
    assert (
        "2 dense features, 5 embeddings of 4" in ran.stdout
        and "torch" not in ran.stdout + ran.stderr
    )
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["ctr.onnx"]
    predictor = pb.Predictor.open(tmp_path / "ctr")
    batch = predictor.encode(clicks.rows[:1])
    given = {"dense": batch.dense.numpy(), "embedding": predictor.embed(batch).numpy()}
    (score,) = opened(onnxruntime, tmp_path / "new" / "ctr.onnx").run(["score"], given)
    assert np.abs(score - predictor(batch).numpy()).max() < 1e-5
    with pytest.raises(ConfigError, match="--overwrite"):
        export_onnx(tmp_path / "ctr", tmp_path / "new" / "ctr.onnx")


SCHEMA = Schema(
    label="click", categorical=tuple(CategoricalFeature(name=name, column=name) for name in "abc")
)


def test_without_dense_features(onnxruntime, tmp_path):
    torch.manual_seed(1)
    model = build_model("dlrm", 0, 3, dim=4, top=[8])
    write_onnx(DensePart(model, SCHEMA, ("a", "b", "c"), 4, "1"), tmp_path / "dense.onnx")
    session = opened(onnxruntime, tmp_path / "dense.onnx")
    embedded = torch.randn(5, 3, 4)
    assert [each.name for each in session.get_inputs()] == ["embedding"]
    (logit,) = session.run(["logit"], {"embedding": embedded.numpy()})
    assert np.abs(logit - model(torch.zeros(5, 0), embedded).detach().numpy()).max() < 1e-5
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="room for the ONNX file"):
        write_onnx(
            DensePart(model, SCHEMA, ("a", "b", "c"), 4, "1"), tmp_path / "file" / "dense.onnx"
        )


def test_what_is_missing_is_named(clicks, tmp_path, monkeypatch):
    monkeypatch.setattr("pibroch.serve.dense_onnx.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pibroch\[onnx\]'"):
        export_onnx(clicks.run, tmp_path / "dense.onnx")
    assert not list(tmp_path.iterdir())
