"""What a predictor predicts with, whatever it was opened from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pibroch.config import RunConfig
from pibroch.config.model import ModelConfig
from pibroch.data import JaggedBatch
from pibroch.data.schema import Schema
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import CheckpointError
from pibroch.models import build_model
from pibroch.models.linear import FEW_SAMPLES, Linear

_one_at_a_time = (
    threading.Lock()
)  # torch remembers the device of `with torch.device(...)` for the whole process


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A trained model whose weights can be read.

    Attributes:
        source: where it came from, for messages.
        version: a name of these weights, different for others.
        step: after which they were saved.
        schema: of the data that it was trained on.
        fingerprint: of that data, see :func:`pibroch.data.writer.fingerprint`.
        features: the categorical features, in the order of the model.
        num_rows: of each feature's table.
        dim: of an embedding, D.
        lookup: pooled embeddings float32 ``[B, F, D]`` of a batch; from any thread.
        dense: the layers above.
        bf16: whether these compute in bfloat16.
        vocabularies: the dictionaries that raw values need; ``None`` where they are not known.
        config: of the run, where it is known.
        sha256: the checksum in the manifest of an export or a delta.
        root: the export that a delta stands on, without its dense layers.
        is_remote: whether a lookup waits for other hosts.
    """

    source: str
    version: str
    step: int
    schema: Schema
    fingerprint: str
    features: tuple[str, ...]
    num_rows: Mapping[str, int]
    dim: int
    lookup: Callable[[JaggedBatch], Tensor]
    dense: nn.Module
    bf16: bool
    vocabularies: Vocabularies | None = None
    config: RunConfig | None = None
    sha256: str | None = None
    root: OpenedModel | None = None
    is_remote: bool = False

    def known(self, sha256: str) -> OpenedModel | None:
        """This one, or the export that it stands on, by the checksum in its manifest."""
        return next(
            (each for each in (self, self.root) if each is not None and each.sha256 == sha256), None
        )


def dense_layers(
    config: ModelConfig,
    num_dense: int,
    features: Sequence[str],
    state: Mapping[str, Tensor],
    source: str,
) -> nn.Module:
    """Layers with these weights; none is initialised, which would draw random numbers.

    Raises:
        CheckpointError: when the weights are not those of the configuration.
    """
    with _one_at_a_time, torch.device("meta"):
        model = build_model(config, num_dense, len(features), features)
    try:
        model.to_empty(device="cpu").load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"dense layers in {source} that are not those of its configuration: {str(error).splitlines()[-1].strip()}",
            "a checkpoint of this version's models",
            "load it with the version of pibroch that wrote it",
        ) from error
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.few_samples = FEW_SAMPLES
    return model
