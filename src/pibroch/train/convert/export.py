"""From a checkpoint to a file of ``torch.save`` that others load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pibroch.embedding import SGD, MemoryShard, Table, Zeros
from pibroch.embedding.row_index import must_be_rows
from pibroch.errors import ConfigError
from pibroch.state.dense import AVERAGES, WEIGHTS
from pibroch.state.files import verify_file
from pibroch.state.manifest import Manifest, read_manifest
from pibroch.state.tables import load_averages, load_tables
from pibroch.state.tensor_file import load_tensors
from pibroch.storage import new_file
from pibroch.train.convert.formats import FORMATS
from pibroch.train.convert.plain import PlainModel, from_state

Advance = Callable[[str], None]


def export_checkpoint(
    folder: Path, out: Path, format_name: str, advance: Advance = lambda file: None
) -> None:
    """Write a checkpoint's weights under another system's names.

    Averages of the weights where the run kept them.

    The model's weights are in memory at once: that is how ``torch.save`` works.

    Args:
        folder: the checkpoint, whose files are verified first.
        out: a file that does not exist yet.
        format_name: one of ``FORMATS``.
        advance: is told each file that was verified, and each table that was read.

    Raises:
        CheckpointError: for a damaged checkpoint.
        ConfigError: for a model that has no equal there, or when ``out`` exists.
        StorageError: when the disk refuses.
    """
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new file", "name another, or remove it")
    manifest = read_manifest(folder)
    must_be_rows(
        {name: saved.index for name, saved in manifest.tables.items()},
        f"a {format_name} file",
        "predict from the checkpoint itself",
    )
    for name, digest in manifest.files.items():
        verify_file(folder, name, digest)
        advance(name)
    content = FORMATS[format_name].write(
        read_plain(folder, manifest, advance), manifest.progress.step
    )
    do = "free some space, or choose another place"
    with new_file(out, "a disk with room for the file", do) as temporary:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)


def read_plain(
    folder: Path, manifest: Manifest, advance: Advance = lambda table: None
) -> PlainModel:
    """The weights of a verified checkpoint, or their averages where the run kept them."""
    decay = manifest.config.train.average
    state = load_tensors(folder, WEIGHTS)
    if decay is not None:
        averages = load_tensors(folder, AVERAGES)
        state = {name: averages[f"module.{name}"] for name in state}
    tables = {}
    for name in manifest.tables:
        tables[name] = _read_table(folder, manifest, name, decay)
        advance(name)
    return from_state(tables, state, manifest.config.model)


def _read_table(folder: Path, manifest: Manifest, name: str, decay: float | None) -> Tensor:
    saved = manifest.tables[name]
    table = Table(name, saved.num_rows, saved.dim, initializer=Zeros())
    shard = MemoryShard.whole([table], SGD(lr=1.0), 0)
    if decay is None:
        load_tables(folder, manifest.tables, shard.views())
    else:
        load_averages(folder, manifest.tables, shard.views(), decay, manifest.progress.step)
    return torch.from_numpy(shard.records)
