"""The dense layers as ONNX: plain tensors in, scores out, for runtimes without tables."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from pibroch.data.schema import Schema
from pibroch.data.targets import scores_of
from pibroch.errors import ConfigError, MissingDependencyError
from pibroch.models.base import Model
from pibroch.models.losses import logit_labels
from pibroch.serve.from_checkpoint import read_verified, saved_dense, version_of
from pibroch.serve.from_delta import open_exported
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.delta_format import is_exported
from pibroch.state.export_format import WRITE_AGAIN
from pibroch.state.manifest import schema_of
from pibroch.storage import new_file

DENSE = "dense"
EMBEDDING = "embedding"
OUTPUTS = ("score", "logit")
_NEEDS = ("onnx", "onnxscript")
_SAMPLES = 2  # of the batch that is traced; its size is free in the file


@dataclass(frozen=True, slots=True)
class DensePart:
    """The layers above the embeddings, and what they take.

    Attributes:
        layers: called with dense features ``[B, n]`` and embeddings ``[B, F, D]``, they give logits
            ``[B]``, or ``[B, T]`` of several tasks.
        schema: of the data, with its n dense features and its tasks.
        features: whose embeddings they take, in order; F of them.
        dim: of an embedding, D.
        version: a name of the weights.
        logit_labels: labels whose loss gives no probabilities.
    """

    layers: nn.Module
    schema: Schema
    features: tuple[str, ...]
    dim: int
    version: str
    logit_labels: tuple[str, ...] = ()


class _Scores(nn.Module):
    """Scores and logits ``[B]`` from plain tensors.

    ``dense`` is left out where the model has no dense features.
    """

    def __init__(self, part: DensePart) -> None:
        super().__init__()
        self.layers = part.layers
        self.schema = part.schema
        self.logit_labels = part.logit_labels

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        embedded = tensors[-1]
        dense = tensors[0] if self.schema.dense else embedded[:, 0, :0]
        logits: Tensor = self.layers(dense, embedded)
        return scores_of(logits, self.schema, self.logit_labels), logits


def dense_part(path: Path) -> DensePart:
    """The dense layers of an export, a delta, a checkpoint or a run's best one.

    Averages of weights where the run kept them.

    Raises:
        CheckpointError: when it is missing, damaged, or not of this version's models.
    """
    if is_exported(path):
        model = open_exported(path)
        about = model.features, model.dim, model.version, model.logit_labels
        return DensePart(model.dense, model.schema, *about)
    folder = find_checkpoint(path)
    manifest = read_verified(folder)
    schema = schema_of(manifest)
    features = schema.keys_by_table
    layers = saved_dense(folder, manifest)
    dim = next(iter(manifest.tables.values())).dim
    of_logits = logit_labels(manifest.config, schema)
    return DensePart(layers, schema, features, dim, version_of(folder, manifest), of_logits)


def refuse_onnx(out: Path, overwrite: bool) -> None:
    """Raise unless an ONNX file can be written there.

    Raises:
        MissingDependencyError: without the extra ``onnx``.
        ConfigError: for an ``out`` that is taken.
    """
    for module in _NEEDS:
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"--onnx without {module}", "the extra `onnx`", "pip install 'pibroch[onnx]'"
            )
    if out.is_dir():
        raise ConfigError(
            f"{out}, a folder, for --onnx", "the name of a file", "choose one, such as ctr.onnx"
        )
    if out.exists() and not overwrite:
        raise ConfigError(f"{out}, which exists", "a new file", "pass --overwrite to replace it")


def export_onnx(path: Path, out: Path, overwrite: bool = False) -> DensePart:
    """Write the dense layers of a model as one ONNX file, there whole or not at all.

    Inputs are ``dense``, float32 ``[batch, n]``, as the schema's transform makes it (absent where n
    is 0), and ``embedding``, float32 ``[batch, F, D]``, pooled; outputs ``score`` and ``logit``,
    float32 ``[batch]``. All is computed in float32, also where the model computes in bfloat16.

    Args:
        path: as for :func:`dense_part`.
        out: the file.
        overwrite: replace one that is there.

    Raises:
        CheckpointError: as there.
        ConfigError: for an ``out`` that is taken.
        MissingDependencyError: without the extra ``onnx``.
        StorageError: when the disk refuses.
    """
    refuse_onnx(out, overwrite)
    part = dense_part(path)
    write_onnx(part, out)
    return part


def write_onnx(part: DensePart, out: Path) -> None:
    """Write these layers, see :func:`export_onnx`.

    Raises:
        ConfigError: for layers that read sequences.
        StorageError: when the disk refuses.
    """
    if isinstance(part.layers, Model) and not part.layers.pools:
        raise ConfigError(
            f"an ONNX file of {type(part.layers).__name__}, which reads sequences",
            "a model of pooled embeddings",
            "serve an export or the checkpoint by pibroch",
        )
    inputs = {EMBEDDING: torch.zeros(_SAMPLES, len(part.features), part.dim)}
    if part.schema.dense:
        inputs = {DENSE: torch.zeros(_SAMPLES, len(part.schema.dense)), **inputs}
    batch = torch.export.Dim("batch")
    part.layers.eval().requires_grad_(False)
    scores = _Scores(part).eval()
    with warnings.catch_warnings(action="ignore"):
        # torch's about its own parts, and that both inputs have one batch size
        program = torch.onnx.export(
            scores,
            tuple(inputs.values()),
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=list(OUTPUTS),
            dynamic_shapes=(tuple({0: batch} for _ in inputs),),
        )
    assert program is not None, "given for no file"
    about = {"version": part.version, "features": json.dumps(part.features)}
    program.model.metadata_props.update({f"pibroch.{name}": value for name, value in about.items()})
    with new_file(out, "a disk with room for the ONNX file", WRITE_AGAIN) as file:
        out.parent.mkdir(parents=True, exist_ok=True)
        program.save(file, external_data=False)
