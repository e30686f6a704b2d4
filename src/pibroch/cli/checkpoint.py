"""``pibroch checkpoint``: look into a checkpoint, verify it, exchange weights with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pibroch.cli.console import results, say
from pibroch.cli.progress import counted
from pibroch.embedding.hashed import Hashed
from pibroch.embedding.hashed_index import counters_in
from pibroch.errors import CheckpointError, ConfigError
from pibroch.observability.records import RawIdsRecord, figure, shown_time
from pibroch.overlap import refuse_overlap
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.dense import ROW_INDICES
from pibroch.state.files import verify_file
from pibroch.state.manifest import Manifest, read_manifest
from pibroch.state.tensor_file import TensorFile

app = typer.Typer(
    help="Inspect, verify and convert checkpoints.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Source = Annotated[
    Path, typer.Argument(metavar="DIR", help="A checkpoint; a run or a folder for its best one.")
]


class System(StrEnum):
    """Systems whose names of parameters are known."""

    TORCHREC = "torchrec"
    DLRM = "dlrm"


class Form(StrEnum):
    """What weights are written as: under the names of a system, or tables alone."""

    TORCHREC = "torchrec"
    DLRM = "dlrm"
    SAFETENSORS = "safetensors"


@app.command("inspect")
def inspect_command(path: Source) -> None:
    """Show a checkpoint: tables, parts, optimizer state, sizes, and where the run was."""
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    kind = "full"
    if manifest.increments:
        kind = f"incremental, {manifest.increments} after the last full one"
    table = Table("table", "rows", "dim", "optimizer state", "parts", "size")
    for column in table.columns[1:3] + table.columns[4:]:
        column.justify = "right"
    for name, saved in manifest.tables.items():
        state = ", ".join(f"{field}[{width}]" for field, width in saved.state.items())
        size = sum(manifest.files[part.file].size_bytes for part in saved.parts)
        whole = sum(not part.is_delta for part in saved.parts)
        changed = len(saved.parts) - whole
        parts = f"{whole} + {changed} changed" if changed else str(whole)
        table.add_row(
            name, f"{saved.num_rows:,}", str(saved.dim), state or "none", parts, decimal(size)
        )
    results.print(f"{folder}: step {manifest.progress.step}, {kind}")
    Console().print(table)
    total = sum(digest.size_bytes for digest in manifest.files.values())
    data = "a program of one's own, saved by pibroch.save"
    if manifest.program is None:
        config = manifest.config
        results.print(
            f"model {config.model.name}, sparse optimizer {config.embedding.optimizer.name}"
        )
        data = f"dataset {manifest.dataset_fingerprint[:12]}"
    else:
        parts = ", ".join(["tables", *manifest.program.parts])
        results.print(f"{parts}; position {manifest.progress.loader or 'not saved'}")
    _show_raw_ids(folder, manifest)
    if manifest.progress.event_time is not None:
        results.print(f"trained until {shown_time(manifest.progress.event_time)} of event time")
    rates = ", ".join(f"{name} {rate:g}" for name, rate in manifest.learning_rates.items())
    results.print(f"learning rates: {rates}")
    results.print(f"{data}, {len(manifest.files) + 1} files, {decimal(total)}")


def _show_raw_ids(folder: Path, manifest: Manifest) -> None:
    """What hashed tables have counted, read beside their rows."""
    names = [
        name
        for name, saved in manifest.tables.items()
        if saved.index is not None and saved.index.get("name") == Hashed.name
    ]
    if not names:
        return
    numbers = ("used", "capacity", "candidates", "admissions", "evictions", "expiries", "steps")
    table = Table("raw ids of", *numbers, "hit rate")
    for column in table.columns[1:]:
        column.justify = "right"
    with TensorFile(folder, ROW_INDICES) as file:
        for name in names:
            prefix = f"{name}."
            arrays = [each for each in file.names if each.startswith(prefix)]
            counters = counters_in({each[len(prefix) :]: file.mapped(each) for each in arrays})
            hit_rate = RawIdsRecord.between({}, counters).hit_rate
            table.add_row(name, *(f"{counters[each]:,}" for each in numbers), figure(hit_rate))
    Console().print(table)


@app.command("verify")
def verify_command(path: Source) -> None:
    """Compare the size and SHA-256 of every file with the manifest.

    Name each one that is damaged or missing.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    problems = []
    with _progress(manifest) as advance:
        for file, digest in manifest.files.items():
            try:
                verify_file(folder, file, digest)
            except CheckpointError as error:
                problems.append((file, error.got))
            advance(file)
    if problems:
        for _, problem in problems:
            say(problem)
        raise CheckpointError(
            f"{folder} with {len(problems)} of {len(manifest.files)} files damaged or missing: "
            + ", ".join(file for file, _ in problems),
            "all files as they were saved",
            "use another checkpoint, or delete this one to resume from the one before",
        )
    results.print(f"{folder}: all {len(manifest.files) + 1} files are as they were saved")


@app.command("convert")
def convert_command(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A checkpoint or run; with --from, what others wrote."),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="The file to write, for safetensors a folder; with --from, a new run directory.",
        ),
    ],
    to: Annotated[
        Form | None,
        typer.Option(
            "--to",
            help="Export under this system's names, or the tables alone, a safetensors file each.",
        ),
    ] = None,
    from_: Annotated[
        System | None, typer.Option("--from", help="Import from this system's names.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="With --from: the recipe whose model is in the file.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="With --from: an encoded dataset, instead of the recipe's.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --from.")
    ] = None,
) -> None:
    """Write weights for TorchRec's or the reference DLRM, or begin a run with theirs.

    An exported DLRM computes the same logits there: the order of interaction pairs is converted,
    batch norm becomes a part of the layer before it, and averages, when the run kept them, are what
    is exported. Of other models the tables are converted and the dense layers keep their names.

    safetensors is a file for each table, of any model, with the ids that have a row.

    **Examples**

        pibroch checkpoint convert runs/mine model.pt --to torchrec

        pibroch checkpoint convert model.pt runs/theirs --from dlrm --recipe recipe.toml --data
        data/criteo

        pibroch train --run-dir runs/theirs --resume

    With `--from`, SRC is a file of `torch.save`, a folder of `torch.distributed.checkpoint`, or one
    with each rank's file.
    """
    if (to is None) == (from_ is None):
        raise ConfigError("both or neither of --to and --from", "one of them", "e.g. --to torchrec")
    if to is Form.SAFETENSORS:
        from pibroch.serve.plain_tables import export_tables

        manifest = read_manifest(find_checkpoint(source))
        with counted(sum(table.num_rows for table in manifest.tables.values()), "rows") as advance:
            count = export_tables(source, out, advance)
        results.print(f"{out}: {count:,} rows of {len(manifest.tables)} tables, with their ids")
        return
    if to is not None:
        from pibroch.train.convert import export_checkpoint

        folder = find_checkpoint(source)
        refuse_overlap(out, [folder], "OUT")
        with _progress(read_manifest(folder)) as advance:
            export_checkpoint(folder, out, to, advance)
        results.print(f"{out}: the weights of {folder} under the names of {to}")
        return
    if recipe is None:
        raise ConfigError(
            "--from without --recipe", "the recipe whose model is in the file", "add --recipe FILE"
        )
    assert from_ is not None, "one of the two was given"
    refuse_overlap(out, [source, recipe, data], "OUT")
    from pibroch.config import load_recipe
    from pibroch.train.convert import import_checkpoint
    from pibroch.train.data_source import open_dataset
    from pibroch.train.run_directory import RunDirectory

    changes = [*(overrides or []), *([f"data.dir={str(data)!r}"] if data else [])]
    config = load_recipe(recipe, changes)
    import_checkpoint(source, RunDirectory(out), from_, config, open_dataset(config.data))
    results.print(f"{out}: a run that begins with the weights of {source}; train it with --resume")


@contextmanager
def _progress(manifest: Manifest) -> Iterator[Callable[[str], None]]:
    """A bar over the bytes of a checkpoint's files: ``advance(file)``."""
    sizes = {name: digest.size_bytes for name, digest in manifest.files.items()}
    with counted(sum(sizes.values()), "bytes") as advance:
        yield lambda name: advance(sizes.get(name, 0))
