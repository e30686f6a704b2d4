"""The entry point: commands, and the one place where errors become messages and exit codes.

Commands import what they need when they run, so that ``pibroch --help`` does not wait for torch.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from pibroch.cli import bench, data
from pibroch.cli.console import console, set_up_logging, show_error
from pibroch.cli.doctor import doctor
from pibroch.cli.report import report
from pibroch.cli.train import evaluate, train
from pibroch.errors import PibrochError
from pibroch.version import __version__

app = typer.Typer(
    help="Train and serve deep recommendation models whose embedding tables outgrow one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.command()(train)
app.command()(evaluate)
app.command()(bench.bench)
app.command()(report)
app.command()(doctor)


class _Stopped(BaseException):
    """A signal asked the process to end; passes through everything that catches errors."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. Works anywhere on the line.")] = False,
) -> None:
    if version:
        typer.echo(f"pibroch {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""
    debug = "--debug" in sys.argv
    sys.argv = [sys.argv[0], *(argument for argument in sys.argv[1:] if argument != "--debug")]
    set_up_logging()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        app()
    except PibrochError as error:
        if debug:
            console.print_exception()
        show_error(error)
        sys.exit(error.exit_code)
    except _Stopped as stopped:
        console.print("stopped; a training run goes on with --resume")
        sys.exit(stopped.exit_code)
    except Exception as error:
        if debug:
            console.print_exception()
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        console.print("This is a bug in pibroch or in its surroundings. Run again with --debug for the traceback.")
        sys.exit(1)
    sys.exit(0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)
