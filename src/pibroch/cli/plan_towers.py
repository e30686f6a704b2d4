"""``pibroch plan towers``: groups of features for models with towers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.cli.progress import counted
from pibroch.overlap import refuse_overlap
from pibroch.process import tune_process


class Strategy(StrEnum):
    """Which features share a tower."""

    COHERENT = "coherent"
    DIVERSE = "diverse"


class Weight(StrEnum):
    """What towers have about the same of."""

    BYTES = "bytes"
    LOOKUPS = "lookups"


def plan_towers(
    checkpoint: Annotated[
        Path, typer.Option(help="A checkpoint, or a run directory for its best one.")
    ],
    data: Annotated[Path, typer.Option(help="The encoded dataset that it was trained on.")],
    out: Annotated[
        Path, typer.Option(help="The file for the groups, for `--set model.towers.groups=FILE`.")
    ],
    towers: Annotated[int, typer.Option(min=1, help="How many, such as one for each host.")] = 2,
    strategy: Annotated[
        Strategy,
        typer.Option(
            help="Features that are alike share a tower, or features that are not; try both."
        ),
    ] = Strategy.COHERENT,
    balance: Annotated[
        Weight, typer.Option(help="What towers are to have about the same of, besides features.")
    ] = Weight.BYTES,
    size_ratio: Annotated[
        float, typer.Option(min=1.0, help="Most features of a tower by the fewest of one.")
    ] = 1.5,
    categories: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of lists of features, such as user = [...]: towers do not mix them."
        ),
    ] = None,
    centred: Annotated[
        bool,
        typer.Option(
            "--centred",
            help="Compare embeddings less their feature's mean; sharper after e.g. deepfm.",
        ),
    ] = False,
    samples: Annotated[
        int, typer.Option(min=1, help="So many samples of the training split are looked at.")
    ] = 20_000,
    page: Annotated[
        Path | None,
        typer.Option(help="A page with the map of features, which needs no other file."),
    ] = None,
) -> None:
    """Group features into towers by how alike their learned embeddings are (DMT, Sec. 3.3).

    Train a model without towers for a while, group its features, then train one with towers:

      pibroch train RECIPE --data DIR --run-dir runs/parent
      pibroch plan towers --checkpoint runs/parent --data DIR --towers 4 --out groups.json
      pibroch train RECIPE --data DIR --set model.name=tower_dlrm
          --set model.towers.groups=groups.json
    """
    tune_process()
    from pibroch.data import EncodedDataset
    from pibroch.planner.towers import Balance
    from pibroch.score.checkpoint import open_for
    from pibroch.score.tower_groups import group_features, read_categories, write_groups, write_map

    refuse_overlap(out, [data, categories])
    if page is not None:
        refuse_overlap(page, [data, categories, out], "--page")
    dataset = EncodedDataset.open(data)
    predictor, _ = open_for(checkpoint, dataset)
    kinds = None if categories is None else read_categories(categories, predictor.features)
    with counted(min(samples, len(dataset.split("train"))), "samples") as advance:
        grouping = group_features(
            predictor,
            dataset,
            towers,
            samples,
            strategy.value,
            Balance(size_ratio),
            kinds,
            weigh_bytes=balance is Weight.BYTES,
            centred=centred,
            advance=advance,
        )
    write_groups(out, grouping)
    if page is not None:
        write_map(page, grouping)
    for number, group in enumerate(grouping.groups):
        size = f"{grouping.bytes_of(group) / 2**20:,.1f} MiB"
        results.print(f"tower {number}: {size}  {', '.join(group)}")
    results.print(
        f"similarity inside towers {grouping.inside:.3f}, between them {grouping.between:.3f};"
        f" wrote {out}"
    )
