"""``pibroch predict``: scores of a whole split in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pibroch.cli.console import console, leave_with, results
from pibroch.cli.progress import counted
from pibroch.errors import PibrochError, RankFailedError
from pibroch.launch.child import die_with_launcher, is_rank, show_launcher, show_rank
from pibroch.overlap import refuse_overlap
from pibroch.process import tune_process

if TYPE_CHECKING:
    from pibroch.score.split import Scored


def predict(
    checkpoint: Annotated[
        Path, typer.Option(help="A checkpoint, or a run directory for its best one.")
    ],
    data: Annotated[Path, typer.Option(help="An encoded dataset.")],
    out: Annotated[Path, typer.Option(help="The file for the scores: .parquet or .csv.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes on this machine that share the tables; on several use torchrun.",
        ),
    ] = 1,
    bound: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With ranks: batches that one may be ahead of others; measured when absent.",
        ),
    ] = None,
) -> None:
    """Score every sample of a split, in its order, into a Parquet or CSV file.

    Sample, label, score.

    A run that was cut off goes on where it was when the same command is given again, with any
    number of ranks.
    """
    die_with_launcher()
    tune_process(is_alone=False if ranks > 1 else None)
    if is_rank():
        show_rank("scorer")
        _as_rank(checkpoint, data, out, split, bound)
        return
    from pibroch.data import EncodedDataset
    from pibroch.score.checkpoint import open_for
    from pibroch.score.split import check_out, opened_split, score_split
    from pibroch.state.checkpoint_folder import find_checkpoint

    check_out(out)
    refuse_overlap(out, [find_checkpoint(checkpoint), data])
    dataset = EncodedDataset.open(data)
    total = len(opened_split(dataset, split, needs_labels=False))
    if ranks > 1:
        raise typer.Exit(_launch(ranks))
    predictor, folder = open_for(checkpoint, dataset)
    started = time.monotonic()
    with counted(total, "samples") as advance:
        done = score_split(predictor, folder, dataset, split, out, advance)
    _show(done, out, time.monotonic() - started)


def _as_rank(checkpoint: Path, data: Path, out: Path, split: str, bound: int | None) -> None:
    """What a rank does; rank 0 shows it, and the one that fails says why."""
    from pibroch.collectives.agreement import agreed
    from pibroch.collectives.world import world_of_environment
    from pibroch.data import EncodedDataset
    from pibroch.score.ranks import score_split_by_ranks
    from pibroch.score.split import opened_split

    try:
        with world_of_environment(leave_with) as world:
            console.quiet = not world.is_first
            dataset = agreed(world.control, lambda: EncodedDataset.open(data))
            total = agreed(
                world.control, lambda: len(opened_split(dataset, split, needs_labels=False))
            )
            started = time.monotonic()
            with counted(total, "samples") as advance:
                done = score_split_by_ranks(checkpoint, dataset, split, out, world, bound, advance)
            if world.is_first:
                _show(done, out, time.monotonic() - started)
    except RankFailedError:
        raise
    except PibrochError as error:
        console.quiet = console.quiet and "(on rank " in error.got
        raise


def _launch(num_ranks: int) -> int:
    """Run this command line as several ranks.

    The exit code of the first that failed, 0 when all are done.
    """
    from pibroch.launch.local import run_ranks

    show_launcher(num_ranks, "scorer")
    death = run_ranks(num_ranks)
    if death is not None and death.signal is not None:
        console.print(f"{death}; the same command goes on where it was")
    return 0 if death is None else death.exit_code


def _show(done: Scored, out: Path, seconds: float) -> None:
    rate = (done.num_samples - done.num_kept) / max(1e-9, seconds)
    kept = f", {done.num_kept:,} of them from before" if done.num_kept else ""
    results.print(f"{done.num_samples:,} scores in {out}{kept}; {rate:,.0f} samples/s")
