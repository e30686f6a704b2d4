"""What a predictor predicts with, whatever it was opened from."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pibroch.config import RunConfig
from pibroch.config.model import ModelConfig
from pibroch.data import JaggedBatch
from pibroch.data.mapped import FileWatch
from pibroch.data.schema import Schema
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import CheckpointError, ConfigError
from pibroch.exchange import EmbeddingOutput
from pibroch.kernels.arrays import Ints
from pibroch.models import build_model
from pibroch.models.linear import FEW_SAMPLES, Linear
from pibroch.untrusted import Refusal

# torch remembers the device of `with torch.device(...)` for the whole process
_one_at_a_time = threading.Lock()


class Lookup(Protocol):
    """Embeddings of a batch, pooled, float32 ``[B, F, D]``, or by feature; from any thread."""

    def __call__(self, batch: JaggedBatch, /) -> Tensor | EmbeddingOutput:
        """By feature where the model wants them unpooled."""

    def has_rows(self, feature: str, ids: Ints) -> NDArray[np.bool_]:
        """Which ids of a feature, int64 ``[V]``, have a row of their own."""


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
        dim: of an embedding, D.
        lookup: of embeddings.
        dense: the layers above.
        bf16: whether these compute in bfloat16.
        vocabularies: the dictionaries that raw values need; ``None`` where they are not known.
        logit_labels: labels whose loss gives no probabilities.
        config: of the run, where it is known.
        sha256: the checksum in the manifest of an export or a delta.
        root: the export that a delta stands on, without its dense layers.
        files: that are mapped; ``None`` where all is in memory.
        event_time: until which it was trained, in milliseconds since 1970,
            where it is known.
    """

    source: str
    version: str
    step: int
    schema: Schema
    fingerprint: str
    features: tuple[str, ...]
    dim: int
    lookup: Lookup
    dense: nn.Module
    bf16: bool
    vocabularies: Vocabularies | None = None
    logit_labels: tuple[str, ...] = ()
    config: RunConfig | None = None
    sha256: str | None = None
    root: OpenedModel | None = None
    files: FileWatch | None = None
    event_time: int | None = None

    @property
    def export(self) -> OpenedModel:
        """The export that a delta stands on; else this."""
        return self.root or self

    def known(self, sha256: str) -> OpenedModel | None:
        """This one, or the export that it stands on, by the checksum in its manifest."""
        return next((each for each in (self, self.export) if each.sha256 == sha256), None)


def dense_layers(
    config: ModelConfig,
    schema: Schema,
    features: Sequence[str],
    state: Mapping[str, Tensor],
    source: str,
) -> nn.Module:
    """Layers with these weights; none is initialised, which would draw random numbers.

    Raises:
        CheckpointError: when the weights are not those of the configuration.
    """
    damaged = Refusal(
        CheckpointError,
        "use a checkpoint of this version's models, or load it with the one that wrote it",
    )
    for name, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise damaged(f"NaN or infinite numbers in {name!r} of {source}", "finite numbers")
    try:
        with _one_at_a_time, torch.device("meta"):
            num_tasks = len(schema.label_columns)
            model = build_model(config, len(schema.dense), len(features), features, num_tasks)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for name, _ in model.named_buffers():
            if name not in wanted:  # and would hold whatever its memory held before
                raise ConfigError(
                    f"the buffer {name!r} of {type(model).__name__}, which its state lacks",
                    "buffers that are saved with the model",
                    "register it without persistent=False",
                )
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        for name in [*wanted, *shapes]:  # before memory is taken for them
            if wanted.get(name) != shapes.get(name):
                need = f"{_shape(wanted.get(name))}, as its configuration says"
                raise damaged(f"{name!r} {_shape(shapes.get(name))} in {source}", need)
        model.to_empty(device="cpu").load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        problem = str(error).splitlines()[-1].strip()
        raise damaged(f"dense layers in {source} that cannot be made: {problem}", "such") from error
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.few_samples = FEW_SAMPLES
    return model


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"
