"""``pibroch report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results


def report(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write; report.html in the run when absent.")
    ] = None,
) -> None:
    """Write one self-contained HTML page with the plots of a run."""
    from pibroch.observability.report import write_report

    results.print(f"wrote {write_report(run_dir, out or run_dir / 'report.html')}")
