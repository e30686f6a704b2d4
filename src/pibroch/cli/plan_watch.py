"""``pibroch plan watch``: how far a plan has decayed under the data that come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.cli.profile import SplitChoice


def plan_watch(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan made by pibroch plan.")],
    data: Annotated[Path, typer.Option(help="The dataset whose samples come, in their order.")],
    topology: Annotated[
        Path | None, typer.Option(help="Of the plan: TOML or JSON; equal links when absent.")
    ] = None,
    split: Annotated[SplitChoice, typer.Option(help="Of the dataset.")] = SplitChoice.TRAIN,
    dim: Annotated[int, typer.Option(min=1, help="Width of all tables.")] = 16,
    every: Annotated[int, typer.Option(min=2, help="Batches between two looks.")] = 50,
    threshold: Annotated[
        float,
        typer.Option(min=1, help="Say so where the plan costs this many times a fresh one's."),
    ] = 1.2,
    half_life: Annotated[
        float, typer.Option(min=1, help="Batches after which one counts half.")
    ] = 25.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of a rank; that of the plan when absent.")
    ] = None,
) -> None:
    """Read samples as they come, and compare the plan with one for recent samples.

    Prints for each look what a step's dearest link costs under both plans, in bytes times the
    link's cost.

    **Example**

        pibroch plan watch plans/five --data data/criteo --split test --every 20
    """
    from pibroch.data.dataset import EncodedDataset
    from pibroch.planner.make import PlanOptions
    from pibroch.planner.partition import TableSize
    from pibroch.planner.replicate import as_mode, as_policy
    from pibroch.planner.store import load_plan
    from pibroch.planner.topology import ClusterTopology
    from pibroch.planner.watch import watch_dataset

    assignment, prediction = load_plan(path)
    ranks = ClusterTopology.uniform(assignment.num_shards)
    if topology is not None:
        ranks = ClusterTopology.load(topology)
    options = PlanOptions(
        extra=prediction.extra, mode=as_mode(prediction.mode), policy=as_policy(prediction.policy)
    )
    dataset = EncodedDataset.open(data)
    tables = [
        TableSize(name, len(rows), 4 * dim, 4 * dim)
        for name, rows in assignment.partition_of.items()
    ]
    looks = watch_dataset(
        dataset,
        split.value,
        assignment,
        tables,
        ranks,
        options,
        batch_size or prediction.batch_size,
        every,
        half_life,
    )
    most = 0.0
    for decay in looks:
        most = max(most, decay.ratio)
        note = "  decayed: plan anew" if decay.ratio > threshold else ""
        results.print(
            f"batch {decay.batches}: {decay.current:,.0f}, a fresh plan {decay.fresh:,.0f},"
            f" {decay.ratio:.2f} times{note}"
        )
    results.print(f"at most {most:.2f} times the cost of a fresh plan")
