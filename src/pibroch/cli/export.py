"""``pibroch export``: a checkpoint to what serving needs, in one folder."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from pibroch.cli.console import results
from pibroch.cli.progress import counted
from pibroch.errors import ConfigError
from pibroch.overlap import refuse_overlap
from pibroch.process import tune_process

if TYPE_CHECKING:
    from pibroch.data import EncodedDataset
    from pibroch.serve.export import ExportOptions
    from pibroch.serve.predictor import Predictor
    from pibroch.state.delta_format import DeltaManifest
    from pibroch.state.export_format import ExportManifest


logger = logging.getLogger(__name__)


class Dtype(StrEnum):
    """Types of exported rows."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or a run for its best one; for --onnx alone an export, too."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to write; may be left out with --onnx or --aot."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of the rows: float32 (the default), float16, or int8 with scale and offset."
        ),
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(
            help="An export or a delta: write only what changed since, and the dense layers."
        ),
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(
            help="A file for the dense layers as ONNX, whose inputs are dense and embeddings."
        ),
    ] = None,
    aot: Annotated[
        Path | None,
        typer.Option(
            help="A file, .pt2, for tables and layers compiled to one package for C++ programs."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The dataset it was trained on, if moved; also prints the AUC before and after."
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Of --data, for the AUC: train, validation or test.")
    ] = "test",
    version: Annotated[
        str | None, typer.Option(help="A name for these weights; step and checksum by default.")
    ] = None,
    min_count: Annotated[
        int,
        typer.Option(
            min=1, help="Of tables of raw ids, leave out ids that training counted less often."
        ),
    ] = 1,
    overwrite: Annotated[
        bool, typer.Option(help="Replace what is already at --out, --onnx and --aot.")
    ] = False,
) -> None:
    """Write all that serving needs into one folder.

    Tables, dense layers, the schema and its dictionaries.

    It is there whole or not at all. `pibroch serve OUT` answers from it;
    pibroch.Predictor.open(OUT) does in programs. With --since it is a delta, which stands on
    another export in the same folder; --onnx writes the dense layers for other runtimes, which get
    the embeddings from a server's /embed. --aot compiles all of the model to a package that C++
    programs run without pibroch. See docs/export.md.
    """
    if out is None and onnx is None and aot is None:
        raise ConfigError("no --out, --onnx or --aot", "at least one of them", "pass --out DIR")
    if out is None and (since, dtype, data, version) != (None, None, None, None):
        raise ConfigError(
            "--since, --dtype, --data or --version without --out",
            "the folder to write",
            "pass --out DIR",
        )
    if out is None and aot is None and min_count != 1:
        raise ConfigError(
            "--min-count without --out or --aot", "what to write", "pass --out DIR, or leave it out"
        )
    tune_process()
    if aot is not None:
        from pibroch.serve.aot import refuse_aot

        refuse_aot(aot, overwrite)
        refuse_overlap(aot, [_read_from(checkpoint), since, data], "--aot")
    if onnx is not None:
        from pibroch.serve.dense_onnx import refuse_onnx

        refuse_onnx(onnx, overwrite)
        refuse_overlap(onnx, [_read_from(checkpoint), since, data], "--onnx")
    if out is not None:
        from pibroch.serve.export import ExportOptions

        if since is not None and dtype is not None:
            raise ConfigError(
                "--dtype with --since",
                "one of them: a delta has its export's type",
                "leave out --dtype",
            )
        options = ExportOptions(
            (dtype or Dtype.FLOAT32).value, data, version, overwrite, min_count=min_count
        )
        _export(checkpoint, out, options, since, split)
    if onnx is not None:
        _export_onnx(checkpoint, onnx, overwrite)
    if aot is not None:
        _export_aot(checkpoint, aot, min_count, overwrite)


def _read_from(path: Path) -> Path:
    """The export, or the checkpoint, that a path means; files may be written beside it."""
    from pibroch.state.checkpoint_folder import find_checkpoint
    from pibroch.state.delta_format import is_exported

    return path if is_exported(path) else find_checkpoint(path)


def _export_onnx(path: Path, out: Path, overwrite: bool) -> None:
    from pibroch.serve.dense_onnx import export_onnx

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is absent
    part = export_onnx(path, out, overwrite)
    results.print(
        f"dense layers of version {part.version} in {out}: {len(part.schema.dense)} dense "
        f"features, {len(part.features)} embeddings of {part.dim}, {decimal(out.stat().st_size)}"
    )


def _export_aot(path: Path, out: Path, min_count: int, overwrite: bool) -> None:
    from pibroch.serve.aot import export_aot

    version, model = export_aot(path, out, overwrite, min_count)
    results.print(
        f"version {version} in {out}: {model.num_rows:,} rows x {model.dim} and the "
        f"layers, {decimal(out.stat().st_size)}; inputs {', '.join(model.inputs)}"
    )


def _export(
    checkpoint: Path,
    out: Path,
    options: ExportOptions,
    since: Path | None,
    split: str,
) -> None:
    """Write an export or a delta, and show what became of the AUC."""
    from pibroch.data import EncodedDataset
    from pibroch.score.split import opened_split
    from pibroch.serve.delta import export_delta
    from pibroch.serve.export import export_checkpoint, refuse_taken
    from pibroch.serve.predictor import Predictor
    from pibroch.state.checkpoint_folder import find_checkpoint
    from pibroch.state.manifest import read_manifest

    data = options.data
    refuse_taken(out, options.overwrite)
    dataset = None if data is None else EncodedDataset.open(data)
    if dataset is not None:
        opened_split(dataset, split)
    folder = find_checkpoint(checkpoint)
    total = sum(table.num_rows for table in read_manifest(folder).tables.values())
    with counted(total, "rows") as advance:
        if since is None:
            summary = _whole(export_checkpoint(folder, out, options, advance), out)
        else:
            summary = _changed(export_delta(folder, since, out, options, advance), out, total)
    results.print(summary)
    if since is not None and out.absolute().parent != since.absolute().parent:
        logger.warning("servers look for %s beside %s: put both into one folder", since, out)
    if dataset is not None:
        base = None if since is None else Predictor.open(since)
        before, after = (
            _auc(predictor, dataset, split)
            for predictor in (Predictor.open(folder), Predictor.open(out, beside=base))
        )
        results.print(f"{split} AUC {before:.6f} before, {after:.6f} after ({after - before:+.6f})")


def _whole(manifest: ExportManifest, out: Path) -> str:
    size = sum(manifest.files[shard.file].size_bytes for shard in manifest.shards)
    total = sum(shard.num_rows for shard in manifest.shards)
    share = size / max(1, 4 * manifest.dim * total)
    return (
        f"version {manifest.version} in {out}: {total:,} rows x {manifest.dim} as {manifest.dtype},"
        f" {decimal(size)}, {share:.3f} of float32"
    )


def _changed(manifest: DeltaManifest, out: Path, total: int) -> str:
    size = sum(digest.size_bytes for digest in manifest.files.values())
    changed = f"{manifest.num_rows:,} of {total:,} rows changed"
    return (
        f"version {manifest.version} in {out}: {changed} since {manifest.base.version},"
        f" {decimal(size)}"
    )


def _auc(predictor: Predictor, dataset: EncodedDataset, split: str) -> float:
    from pibroch.data import Loader
    from pibroch.score.split import opened_split
    from pibroch.train.evaluation import predict

    predictions = predict(Loader(opened_split(dataset, split), 8192), predictor.logits)
    return predictions.result().metrics.auc
