"""``pibroch export``: a checkpoint to what serving needs, in one folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pibroch.cli.console import console, results
from pibroch.process import tune_process

if TYPE_CHECKING:
    from pibroch.data import EncodedDataset
    from pibroch.serve.predictor import Predictor


class Dtype(StrEnum):
    """Types of exported rows."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run directory for its best one.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    dtype: Annotated[
        Dtype, typer.Option(help="Of the embedding rows: float32, float16, or int8 with a scale and an offset a row.")
    ] = Dtype.FLOAT32,
    data: Annotated[
        Path | None,
        typer.Option(help="The dataset it was trained on, if moved; the AUC before and after is printed, too."),
    ] = None,
    split: Annotated[str, typer.Option(help="Of --data, for the AUC: train, validation or test.")] = "test",
    version: Annotated[str | None, typer.Option(help="A name for these weights; step and checksum by default.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an export that is already at --out.")] = False,
) -> None:
    """Write all that serving needs into one folder: tables, dense layers, the schema and its dictionaries.

    It is there whole or not at all. `pibroch serve OUT` answers from it; pibroch.Predictor.open(OUT) does in programs.
    """
    tune_process()
    from pibroch.data import EncodedDataset
    from pibroch.serve.export import ExportOptions, export_checkpoint, refuse_taken
    from pibroch.serve.predictor import Predictor
    from pibroch.train.checkpoint_folder import find_checkpoint
    from pibroch.train.manifest import read_manifest
    from pibroch.train.scoring import opened_split

    refuse_taken(out, overwrite)
    dataset = None if data is None else EncodedDataset.open(data)
    if dataset is not None:
        opened_split(dataset, split)
    folder = find_checkpoint(checkpoint)
    total = sum(table.num_rows for table in read_manifest(folder).tables.values())
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    options = ExportOptions(dtype.value, data, version, overwrite)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        manifest = export_checkpoint(folder, out, options, lambda count: bar.advance(task, count))
    size = sum(manifest.files[shard.file].size_bytes for shard in manifest.shards)
    share = size / (4 * manifest.dim * total)
    results.print(
        f"version {manifest.version} in {out}: {total:,} rows x {manifest.dim} as {dtype.value}, {decimal(size)}, "
        f"{share:.3f} of float32"
    )
    if dataset is not None:
        before, after = (_auc(Predictor.open(path), dataset, split) for path in (folder, out))
        results.print(f"{split} AUC {before:.6f} before, {after:.6f} after ({after - before:+.6f})")


def _auc(predictor: Predictor, dataset: EncodedDataset, split: str) -> float:
    from pibroch.data import Loader
    from pibroch.train.evaluation import predict
    from pibroch.train.scoring import opened_split

    predictions = predict(Loader(opened_split(dataset, split), 8192), predictor.logits)
    return predictions.result()[0].auc
