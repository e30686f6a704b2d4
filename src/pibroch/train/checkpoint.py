"""Whole checkpoints: a folder with tables, dense weights, optimizer state, random state and a manifest of checksums.

``step-00000123/``: ``manifest.json``, ``dense.safetensors``, ``dense_optimizer.safetensors``, ``random.safetensors``,
``tables/<name>.safetensors``, and with averages ``dense_average.safetensors``. Nothing in it depends on time or place:
equal runs write equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.torch import load_file

from pibroch.config import RunConfig
from pibroch.config.base import Section
from pibroch.embedding.checkpoint import (
    SavedTable,
    check_tables_match,
    load_tables,
    save_tables,
    saved_shape,
)
from pibroch.embedding.storage import FileDigest, atomic_folder, verify_file, write_tensors
from pibroch.errors import CheckpointError
from pibroch.train.monitor import Monitor
from pibroch.train.session import Session

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"


class Progress(Section):
    """How far a run is; ``loader`` is the loader's state after the last batch that was trained on."""

    step: int = 0
    loader: dict[str, Any] | None = None
    monitor: Monitor = Monitor()


class Manifest(Section):
    """What a checkpoint says of itself.

    Attributes:
        dataset_fingerprint: of the data that it was trained on.
        data_schema: the dataset's schema; serving encodes requests with it.
        learning_rates: in the last step, of ``dense`` layers and ``embedding`` rows.
        files: every other file with its size and checksum.
    """

    format_version: int
    dataset_fingerprint: str
    data_schema: dict[str, Any]
    tables: dict[str, SavedTable]
    config: RunConfig
    progress: Progress
    learning_rates: dict[str, float]
    files: dict[str, FileDigest]


def save_checkpoint(folder: Path, session: Session, progress: Progress) -> None:
    """Write a checkpoint; it is there whole or not at all.

    Raises:
        StorageError: when the disk refuses.
        TrainingError: when a parameter is NaN or infinite.
    """
    with atomic_folder(folder) as temporary:
        files = {
            name: write_tensors(temporary / name, _arrays(tensors)) for name, tensors in _dense_files(session).items()
        }
        files |= save_tables(temporary, session.embeddings.tables, session.embeddings.shard)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            dataset_fingerprint=session.dataset.fingerprint,
            data_schema=session.dataset.schema.model_dump(mode="json"),
            tables=_table_shapes(session),
            config=session.config,
            progress=progress,
            learning_rates={
                "dense": session.optimizer.param_groups[0]["lr"],
                "embedding": session.embeddings.learning_rate,
            },
            files=files,
        )
        content = manifest.model_dump(mode="json")
        content["sha256"] = _content_checksum(content)
        (temporary / _MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, itself checked.

    Raises:
        CheckpointError: when there is none, or when it is damaged.
    """
    path = folder / _MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checksum = content.pop("sha256")
        if checksum != _content_checksum(content):
            raise ValueError("its checksum does not match its content")
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} of format {content.get('format_version')}",
                f"format {FORMAT_VERSION}",
                "load it with the version of pibroch that wrote it",
            )
        return Manifest.model_validate(content)
    except FileNotFoundError as error:
        raise CheckpointError(f"no {path}", "a checkpoint folder", "name a folder that pibroch train wrote") from error
    except (ValueError, KeyError, AttributeError, OSError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(
            f"{path}, which is damaged: {problem}", "an undamaged file", "use another checkpoint"
        ) from error


def restore_checkpoint(folder: Path, manifest: Manifest, session: Session) -> None:
    """Bring a session to exactly where the checkpoint was saved.

    Raises:
        CheckpointError: when a file is damaged, or when the tables are not those of the session.
    """
    _verify(folder, manifest, session, same_state=True)
    if manifest.dataset_fingerprint != session.dataset.fingerprint:
        raise CheckpointError(
            f"a checkpoint of dataset {manifest.dataset_fingerprint[:12]}",
            f"one of dataset {session.dataset.fingerprint[:12]}, which this run reads",
            "resume with the data that the run began with",
        )
    _load_weights(folder, manifest, session)
    _load_optimizer(session, load_file(folder / "dense_optimizer.safetensors"))
    torch.set_rng_state(load_file(folder / "random.safetensors")["torch"])


def restore_weights(folder: Path, manifest: Manifest, session: Session) -> None:
    """Load what predictions depend on, into tables of any optimizer that keeps averages if the run kept them.

    Raises:
        CheckpointError: as `restore_checkpoint`, but for another dataset of equal table sizes.
    """
    _verify(folder, manifest, session, same_state=False)
    _load_weights(folder, manifest, session)


def _load_weights(folder: Path, manifest: Manifest, session: Session) -> None:
    load_tables(folder, session.embeddings.tables, session.embeddings.shard)
    session.embeddings.step = manifest.progress.step
    session.model.load_state_dict(load_file(folder / "dense.safetensors"))
    if session.averages is not None:
        session.averages.load_state_dict(load_file(folder / "dense_average.safetensors"))


def _verify(folder: Path, manifest: Manifest, session: Session, *, same_state: bool) -> None:
    check_tables_match(manifest.tables, _table_shapes(session), same_state=same_state)
    for file, digest in manifest.files.items():
        verify_file(folder / file, digest)


def _table_shapes(session: Session) -> dict[str, SavedTable]:
    return {table.name: saved_shape(table.name, session.embeddings.shard) for table in session.embeddings.tables}


def _dense_files(session: Session) -> dict[str, dict[str, torch.Tensor]]:
    """Everything but the tables, by file."""
    averages = {} if session.averages is None else {"dense_average.safetensors": session.averages.state_dict()}
    return {
        "dense.safetensors": session.model.state_dict(),
        "dense_optimizer.safetensors": _optimizer_tensors(session),
        "random.safetensors": {"torch": torch.get_rng_state()},
        **averages,
    }


def _optimizer_tensors(session: Session) -> dict[str, torch.Tensor]:
    """State of the dense optimizer under ``<parameter>/<field>``."""
    names = [name for name, _ in session.model.named_parameters()]
    return {
        f"{names[position]}/{field}": torch.as_tensor(value)
        for position, fields in session.optimizer.state_dict()["state"].items()
        for field, value in fields.items()
        if value is not None
    }


def _load_optimizer(session: Session, tensors: Mapping[str, torch.Tensor]) -> None:
    position = {name: i for i, (name, _) in enumerate(session.model.named_parameters())}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        state.setdefault(position[name], {})[field] = tensor
    groups = session.optimizer.state_dict()["param_groups"]
    session.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}


def _content_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
