"""``pibroch plan topology``: what a byte costs between the ranks of a machine, or of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import leave_with, results
from pibroch.cli.progress import counted
from pibroch.launch.child import die_with_launcher, is_rank, show_launcher, show_rank
from pibroch.process import tune_process
from pibroch.storage import storage_errors


def plan_topology(
    out: Annotated[
        Path, typer.Option(help="The file to write, for `pibroch plan --topology`: .json.")
    ],
    ranks: Annotated[
        int, typer.Option(min=1, help="So many ranks on this machine; torchrun says it otherwise.")
    ] = 1,
) -> None:
    """Measure the links between ranks.

    Own memory, a neighbour's, another host's, and the sum over all.

    On several machines run it as training is run there:

      torchrun --nnodes 2 --nproc-per-node 1 ... -m pibroch plan topology --out topology.json
    """
    die_with_launcher()
    tune_process(is_alone=False if ranks > 1 else None)
    if ranks > 1 and not is_rank():
        from pibroch.launch.local import run_ranks

        show_launcher(ranks, "measurer")
        raise typer.Exit(0 if run_ranks(ranks) is None else 1)
    from pibroch.collectives.world import world_of_environment
    from pibroch.planner.topology import ClusterTopology
    from pibroch.train.measured_topology import measure

    show_rank("measurer")
    with world_of_environment(leave_with) as world:
        size = world.ranks.world_size
        with counted(size * (size - 1) // 2, "pairs", world.is_first) as advance:
            topology = measure(world.control, lambda: advance(1)).content()
        if not world.is_first:
            return
        ClusterTopology.of(topology, "what was measured")
        with storage_errors(out, "a place to write to", ""):
            out.write_text(json.dumps(topology, indent=1) + "\n", encoding="utf-8")
        for number, row in enumerate(topology["cost"]):  # type: ignore[arg-type, var-annotated]
            costs = "  ".join(f"{cost:>7g}" for cost in row)
            results.print(f"rank {number} reads at {costs}")
        results.print(f"wrote {out}")
