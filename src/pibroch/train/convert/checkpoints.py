"""From a checkpoint to a file of ``torch.save``, and from what others wrote to a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pibroch.config import RunConfig
from pibroch.config.model import DLRMConfig
from pibroch.data import EncodedDataset
from pibroch.embedding import SGD, MemoryShard, Table, Zeros
from pibroch.embedding.row_index import must_be_rows
from pibroch.errors import CheckpointError, ConfigError
from pibroch.state.checkpoint import dense_weights, load_rows
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.files import verify_file
from pibroch.state.manifest import Manifest, Progress, read_manifest
from pibroch.storage import new_file
from pibroch.train.convert.formats import FORMATS
from pibroch.train.convert.plain import PlainModel, from_state, to_state
from pibroch.train.convert.sources import read_source
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import Session, build_session

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
    tables = {}
    for name, saved in manifest.tables.items():
        table = Table(name, saved.num_rows, saved.dim, initializer=Zeros())
        shard = MemoryShard.whole([table], SGD(lr=1.0), 0)
        load_rows(folder, manifest, shard.views())
        tables[name] = torch.from_numpy(shard.records)
        advance(name)
    return from_state(tables, dense_weights(folder, manifest), manifest.config.model)


def import_checkpoint(
    source: Path, run: RunDirectory, format_name: str, config: RunConfig, dataset: EncodedDataset
) -> None:
    """Begin a run with another system's weights as its checkpoint of step 0.

    All optimizer state is fresh.

    Args:
        source: what others wrote, see :func:`~pibroch.train.convert.sources.read_source`; it runs
            no code.
        run: a new directory.
        format_name: one of ``FORMATS``.
        config: whose model is the one in the file.
        dataset: whose tables are those in the file.

    Raises:
        CheckpointError: when the file is none, or its parameters are not those of the model; names
            the first that differs.
        ConfigError: for a model with batch norm, which the others do not have.
        StorageError: when the disk refuses.
    """
    if isinstance(config.model, DLRMConfig) and config.model.batch_norm:
        raise ConfigError(
            "a DLRM with batch norm",
            "one without, as the file has none",
            "pass --set model.batch_norm=false",
        )
    run.must_be_new()
    model = FORMATS[format_name].read(read_source(source), list(dataset.num_rows))
    session = build_session(config, dataset)
    must_be_rows(
        {table.name: table.rows.described() for table in session.embeddings.tables},
        "weights from a file",
        "import them into a recipe without [embedding.rows]",
    )
    fill_session(session, model)
    run.create(config)
    CheckpointFolder(run.checkpoints_path, config.train.keep).save(session, Progress())


def fill_session(session: Session, model: PlainModel) -> None:
    """Put a model's weights, which are also the first averages, into a session.

    Raises:
        CheckpointError: names the first parameter that is missing, left over or of another shape.
    """
    state = to_state(model)
    wanted = session.model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    shapes |= {f"table {name}": tuple(table.shape) for name, table in model.tables.items()}
    needed = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    needed |= {
        f"table {table.name}": (table.num_rows, table.dim) for table in session.embeddings.tables
    }
    for name in [*needed, *shapes]:
        if shapes.get(name) != needed.get(name):
            raise CheckpointError(
                f"{name!r} {_shape(shapes.get(name))} in the file",
                f"{_shape(needed.get(name))}, as the recipe has",
                "choose the recipe and the data of that model",
            )
    session.model.load_state_dict(state)
    if session.averages is not None:
        session.averages.module.load_state_dict(state)
    for view in session.embeddings.pieces():
        view.weights[:] = model.tables[view.piece.table.name].float().numpy()
        if "average" in view.state:
            view.state["average"][:] = view.weights


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"
