"""``pibroch profile``: how often each row is read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.overlap import refuse_overlap


class SplitChoice(StrEnum):
    """Splits of a dataset."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


def profile(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A dataset, a trace (one index a line), or a profile."),
    ],
    out: Annotated[Path, typer.Option(help="The profile to write.")],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of a rank's batch: rows travel once a batch.")
    ] = 1024,
    split: Annotated[SplitChoice, typer.Option(help="Of the dataset.")] = SplitChoice.TRAIN,
    first: Annotated[
        int | None, typer.Option(min=1, help="Count this many samples alone, from the first on.")
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Make batches in the order of training.")
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TABLE=]N",
            help="Rows of a trace's table; with --to-samples, of a table then; repeatable.",
        ),
    ] = None,
    to_samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Extrapolate to this many samples: thinning gives back what was counted."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the extrapolation.")] = 0,
) -> None:
    """Count accesses to each row, and the batches in which it occurs.

    What `pibroch plan` places rows by.

    Lookups cost once an access, transfers once a batch. A dataset is read once, in a stream; a
    profile is one file.

    **Examples**

        pibroch profile data/criteo --out criteo.profile --batch-size 2048

        pibroch profile trace.txt.gz --rows 500000 --out trace.profile

        pibroch profile sample.profile --to-samples 45840617 --rows C3=10131227 --out full.profile
    """
    from pibroch.cli.profile_sources import make_profile, name_rows
    from pibroch.cli.progress import stages
    from pibroch.planner.count import CountOptions

    refuse_overlap(out, [source])
    options = CountOptions(batch_size, split.value, first, shuffle, seed)
    with stages() as progress:
        made = make_profile(source, options, name_rows(rows or ()), to_samples, progress)
        made.save(out)
    results.print(
        f"{out}: {made.num_samples:,} samples in {made.num_batches:,} batches of"
        f" {made.batch_size:,}, {made.num_accesses:,} accesses to {sum(made.num_rows.values()):,}"
        f" rows of {len(made.tables)} tables"
    )
