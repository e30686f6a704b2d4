"""``pibroch plan``: decisions that are made before a run."""

from __future__ import annotations

import typer

from pibroch.cli.plan_topology import plan_topology
from pibroch.cli.plan_towers import plan_towers

app = typer.Typer(help="Decide where rows lie and which features share a tower.", no_args_is_help=True)
app.command("towers")(plan_towers)
app.command("topology")(plan_topology)


@app.callback()
def _group() -> None:
    """Decide where rows lie and which features share a tower."""
