"""A model as plain tensors, with neither our names nor those of others.

What every conversion goes through.

Shape legend: D embedding width, M = F + 1 vectors of a sample, P = M (M - 1) / 2 pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pibroch.config.model import DLRMConfig, ModelConfig
from pibroch.errors import ConfigError

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Layer:
    """``x @ weight.T + bias``."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PlainModel:
    """Tables, and the dense layers of a DLRM, or of another model under our names.

    Attributes:
        tables: weights ``[rows, D]`` by name, in the order of the features.
        bottom: layers of a DLRM's bottom network, each followed by a ReLU.
        top: of its top network, with a ReLU between them. The first one's columns are the bottom's
            D outputs and the pairs of the strictly lower triangle by rows: (1, 0), (2, 0), (2, 1),
            ...; vector 0 is the bottom's.
        other: the dense layers of any other model.
    """

    tables: dict[str, Tensor]
    bottom: list[Layer] = field(default_factory=list)
    top: list[Layer] = field(default_factory=list)
    other: dict[str, Tensor] = field(default_factory=dict)


def from_state(
    tables: dict[str, Tensor], state: Mapping[str, Tensor], config: ModelConfig
) -> PlainModel:
    """Our model's ``state_dict`` as plain layers.

    Batch norm of the top network becomes a part of the layer before it.

    Raises:
        ConfigError: for a DLRM that other systems cannot express: another activation, or no dense
            features.
    """
    if not isinstance(config, DLRMConfig):
        return PlainModel(tables, other=dict(state))
    if config.activation != "relu" or "constant" in state:
        is_relu = config.activation == "relu"
        got = "no dense features" if is_relu else f"activation {config.activation!r}"
        raise ConfigError(
            f"a DLRM with {got}", "ReLU and dense features, as the other systems' DLRM has"
        )
    bottom, top = (
        [_with_norm(state, name, i) for i in range(_count(state, name))]
        for name in ("bottom", "top")
    )
    return PlainModel(tables, bottom, top)


def to_state(model: PlainModel) -> dict[str, Tensor]:
    """The reverse of :func:`from_state`, for a model without batch norm."""
    bottom = named_layers(model.bottom, "bottom.layers.{}.")
    return model.other | bottom | named_layers(model.top, "top.layers.{}.")


def named_layers(layers: Sequence[Layer], pattern: str, step: int = 1) -> dict[str, Tensor]:
    """Weights and biases, whose names begin with the pattern and the layer's number in it."""
    named: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        prefix = pattern.format(step * i)
        named |= {f"{prefix}weight": layer.weight, f"{prefix}bias": layer.bias}
    return named


def upper_to_lower(num_vectors: int) -> Tensor:
    """Place in the lower triangle's order of each pair in the upper triangle's, ``[P]``.

    >>> upper_to_lower(4).tolist()  # (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
    [0, 1, 3, 2, 4, 5]
    """
    small, large = torch.triu_indices(num_vectors, num_vectors, 1)
    places: Tensor = large * (large - 1) // 2 + small
    return places


def reorder_pairs(layer: Layer, dim: int, places: Tensor) -> Layer:
    """The layer with its columns from ``dim`` on taken from ``places``."""
    return Layer(
        torch.cat([layer.weight[:, :dim], layer.weight[:, dim:][:, places]], 1), layer.bias
    )


def _count(state: Mapping[str, Tensor], network: str) -> int:
    return sum(bool(re.fullmatch(rf"{network}\.layers\.\d+\.weight", name)) for name in state)


def _with_norm(state: Mapping[str, Tensor], network: str, i: int) -> Layer:
    weight = state[f"{network}.layers.{i}.weight"]
    norm = f"{network}.norms.{i}"
    if f"{norm}.weight" not in state:
        return Layer(weight, state[f"{network}.layers.{i}.bias"])
    scale = (
        state[f"{norm}.weight"].double() / (state[f"{norm}.running_var"].double() + NORM_EPS).sqrt()
    )
    # the layer before a norm has none
    bias = state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale
    return Layer((weight * scale[:, None]).float(), bias.float())
