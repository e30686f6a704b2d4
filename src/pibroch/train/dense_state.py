"""Everything of a checkpoint but the tables, which is the same on every rank: dense layers, their optimizer, random state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from pibroch.embedding.storage import FileDigest
from pibroch.embedding.tensor_file import write_tensors

if TYPE_CHECKING:
    from pibroch.train.session import Session

WEIGHTS, OPTIMIZER = "dense.safetensors", "dense_optimizer.safetensors"
AVERAGES, RANDOM = "dense_average.safetensors", "random.safetensors"


def save_dense(folder: Path, session: Session) -> dict[str, FileDigest]:
    """Write the files into a checkpoint; returns their digests.

    Raises:
        TrainingError: when a parameter is NaN or infinite.
        OSError: when the disk refuses.
    """
    averages = {} if session.averages is None else {AVERAGES: session.averages.state_dict()}
    files = {
        WEIGHTS: session.model.state_dict(),
        OPTIMIZER: _optimizer_tensors(session),
        RANDOM: {"torch": torch.get_rng_state()},
        **averages,
    }
    return {name: write_tensors(folder / name, _arrays(tensors)) for name, tensors in files.items()}


def load_dense_weights(folder: Path, session: Session) -> None:
    """Load the model, and its averages where the session keeps them."""
    session.model.load_state_dict(load_file(folder / WEIGHTS))
    if session.averages is not None:
        session.averages.load_state_dict(load_file(folder / AVERAGES))


def load_dense_optimizer(folder: Path, session: Session) -> None:
    """Load the dense optimizer's state and the random state."""
    position = {name: i for i, (name, _) in enumerate(session.model.named_parameters())}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / OPTIMIZER).items():
        name, _, field = key.rpartition("/")
        state.setdefault(position[name], {})[field] = tensor
    groups = session.optimizer.state_dict()["param_groups"]
    session.optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(load_file(folder / RANDOM)["torch"])


def _optimizer_tensors(session: Session) -> dict[str, torch.Tensor]:
    """State of the dense optimizer under ``<parameter>/<field>``."""
    names = [name for name, _ in session.model.named_parameters()]
    return {
        f"{names[position]}/{field}": torch.as_tensor(value)
        for position, fields in session.optimizer.state_dict()["state"].items()
        for field, value in fields.items()
        if value is not None
    }


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
