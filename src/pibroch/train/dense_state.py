"""Everything of a checkpoint but the tables: dense layers, their optimizer, random state.

Rank 0 writes it. It has all but what belongs to other groups of ranks, whose first ranks send it that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, load_file, save
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.collectives.ownership import all_parts, is_within, own_parts
from pibroch.embedding.storage import FileDigest
from pibroch.embedding.tensor_file import write_tensors
from pibroch.errors import CheckpointError

if TYPE_CHECKING:
    from pibroch.train.session import Session

WEIGHTS, OPTIMIZER = "dense.safetensors", "dense_optimizer.safetensors"
AVERAGES, RANDOM = "dense_average.safetensors", "random.safetensors"
_AVERAGED = "module."  # what torch's averages put before each name

DenseState = dict[str, dict[str, Tensor]]
"""Tensors by file and name."""


def gather_dense(session: Session, channel: Channel) -> DenseState:
    """All that :func:`save_dense` is to write, on rank 0; nothing on the others. Every rank calls it.

    Sends only what belongs to groups of ranks. Blocks until it has come.

    Raises:
        RankFailedError: when a rank was lost.
    """
    is_first, parts = channel.ranks.rank == 0, all_parts(session.model)
    state = _dense_state(session) if is_first or parts else {}
    if not parts:
        return state
    led = [part for part, members in parts.items() if min(members) == channel.ranks.rank_in_run]
    mine = {} if is_first else {file: _within(file, tensors, led) for file, tensors in state.items()}
    for sent in _to_first(channel, mine):
        for file, tensors in sent.items():
            state[file] |= tensors
    return state if is_first else {}


def save_dense(folder: Path, state: DenseState) -> dict[str, FileDigest]:
    """Write the files into a checkpoint; returns their digests.

    Raises:
        TrainingError: when a parameter is NaN or infinite.
        OSError: when the disk refuses.
    """
    return {name: write_tensors(folder / name, _arrays(tensors)) for name, tensors in state.items()}


def load_dense_weights(folder: Path, session: Session) -> None:
    """Load what this rank holds of the model, and of its averages where the session keeps them.

    Raises:
        CheckpointError: when they are not the session's.
    """
    try:
        session.model.load_state_dict(_load_own(folder, WEIGHTS, session))
        if session.averages is not None:
            session.averages.load_state_dict(_load_own(folder, AVERAGES, session))
    except RuntimeError as error:
        raise CheckpointError(
            f"dense layers in {folder} that are not those of this run: {str(error).splitlines()[-1].strip()}",
            "a checkpoint of this model, of this version of pibroch",
            "resume with the model and the version that wrote it, or start anew",
        ) from error


def load_dense_optimizer(folder: Path, session: Session) -> None:
    """Load what this rank holds of the dense optimizer's state, and the random state."""
    position = {name: i for i, (name, _) in enumerate(session.model.named_parameters())}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in _load_own(folder, OPTIMIZER, session).items():
        name, _, field = key.rpartition("/")
        state.setdefault(position[name], {})[field] = tensor
    groups = session.optimizer.state_dict()["param_groups"]
    session.optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(load_file(folder / RANDOM)["torch"])


def _dense_state(session: Session) -> DenseState:
    averages = {} if session.averages is None else {AVERAGES: session.averages.state_dict()}
    return {
        WEIGHTS: session.model.state_dict(),
        OPTIMIZER: _optimizer_tensors(session),
        RANDOM: {"torch": torch.get_rng_state()},
        **averages,
    }


def _within(file: str, tensors: Mapping[str, Tensor], parts: Iterable[str]) -> dict[str, Tensor]:
    """What a file has of some parts of the model."""
    named = [_AVERAGED + part for part in parts] if file == AVERAGES else [*parts]
    return {name: tensor for name, tensor in tensors.items() if is_within(name, named)}


def _load_own(folder: Path, file: str, session: Session) -> dict[str, Tensor]:
    """What a file has, without parts of the model that belong to groups of other ranks."""
    tensors = load_file(folder / file)
    elsewhere = _within(file, tensors, all_parts(session.model).keys() - own_parts(session.model).keys())
    return {name: tensor for name, tensor in tensors.items() if name not in elsewhere}


def _to_first(channel: Channel, state: DenseState) -> list[DenseState]:
    """Every rank's, on rank 0; nothing on the others. One message from each, which is there twice meanwhile."""
    size, is_first = channel.ranks.world_size, channel.ranks.rank == 0
    tensors = {f"{file}:{name}": each.cpu().clone() for file, named in state.items() for name, each in named.items()}
    blob = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    lengths = channel.gather(len(blob))
    came = channel.all_to_all(blob, [len(blob)] + [0] * (size - 1), lengths if is_first else [0] * size)
    states: list[DenseState] = []
    for part in came.split(lengths) if is_first else []:
        states.append({})
        for key, tensor in load(part.numpy().tobytes()).items():
            file, _, name = key.partition(":")
            states[-1].setdefault(file, {})[name] = tensor
    return states


def _optimizer_tensors(session: Session) -> dict[str, Tensor]:
    """State of the dense optimizer under ``<parameter>/<field>``."""
    names = [name for name, _ in session.model.named_parameters()]
    return {
        f"{names[position]}/{field}": torch.as_tensor(value)
        for position, fields in session.optimizer.state_dict()["state"].items()
        for field, value in fields.items()
        if value is not None
    }


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
