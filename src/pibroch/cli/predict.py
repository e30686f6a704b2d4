"""``pibroch predict``: scores of a whole split in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pibroch.cli.console import console, results
from pibroch.process import tune_process


def predict(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run directory for its best one.")],
    data: Annotated[Path, typer.Option(help="An encoded dataset.")],
    out: Annotated[Path, typer.Option(help="The file for the scores: .parquet or .csv.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
) -> None:
    """Score every sample of a split, in its order, into a Parquet or CSV file: sample, label, score.

    A run that was cut off goes on where it was when the same command is given again.
    """
    tune_process()
    from pibroch.data import EncodedDataset
    from pibroch.train.run import open_for
    from pibroch.train.scoring import check_out, opened_split, score_split

    check_out(out)
    dataset = EncodedDataset.open(data)
    total = len(opened_split(dataset, split))
    predictor, folder = open_for(checkpoint, dataset)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeRemainingColumn())
    started = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        done = score_split(predictor, folder, dataset, split, out, lambda count: bar.advance(task, count))
    rate = (done.num_samples - done.num_kept) / max(1e-9, time.monotonic() - started)
    kept = f", {done.num_kept:,} of them from before" if done.num_kept else ""
    results.print(f"{done.num_samples:,} scores in {out}{kept}; {rate:,.0f} samples/s")
