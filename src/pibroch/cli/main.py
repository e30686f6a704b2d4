"""The entry point: commands, and the one place where errors become messages and exit codes.

Commands import what they need when they run, so that ``pibroch --help`` does not wait for torch.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from pibroch.cli.compare import compare
from pibroch.cli.console import console, leave, leave_with, set_up_logging
from pibroch.cli.doctor import doctor
from pibroch.cli.export import export
from pibroch.cli.predict import predict
from pibroch.cli.profile import profile
from pibroch.cli.recipes import recipes
from pibroch.cli.report import report
from pibroch.cli.role_commands import command_of
from pibroch.cli.search import search
from pibroch.cli.serve import serve
from pibroch.cli.train import evaluate, train
from pibroch.errors import ConfigError, PibrochError, StorageError
from pibroch.launch.child import has_launcher
from pibroch.roles import roles
from pibroch.version import __version__

app = typer.Typer(
    help="Train deep recommendation models whose embedding tables outgrow one machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(recipes)
app.command()(train)
app.command()(evaluate)
app.command()(search)
app.command()(predict)
app.command()(export)
app.command()(serve)
for _role in roles():
    app.command(_role.command)(command_of(_role))
app.command()(profile)
app.command()(report)
app.command()(compare)
app.command()(doctor)

# Groups whose modules take long to import: their help here, their commands when the command line
# names them.
_GROUPS = {
    "data": "Turn raw click logs into encoded datasets, or generate one of known best AUC.",
    "stream": "Streams of events: generate one whose best AUC is known at each moment.",
    "checkpoint": "Inspect, verify and convert checkpoints.",
    "job": "Write a run's processes down for a cluster that starts them.",
    "publish": "Versions that a run publishes: list them, have servers go back to an earlier one.",
    "plan": "Place rows by how often they are read, copy the hottest, group features; explain.",
    "simulate": "What a step would take on hosts that are not here: `pibroch simulate RECIPE`.",
    "bench": "Measure against what others use: correctness first, then tables and a plot.",
}

_REFUSALS = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ELOOP, errno.EMFILE,
    errno.ENAMETOOLONG, errno.ENFILE, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""What the system refuses because of the place that was named or of its own limits.

No bug of whoever asked.
"""
_Kind = TypeVar("_Kind", bound=BaseException)


class _Stopped(BaseException):
    """A signal asked the process to end; passes through everything that catches errors."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pibroch {__version__}")
        raise typer.Exit


def _allow_modules(modules: list[str] | None) -> None:
    if modules:
        from pibroch.config.registry import allow

        allow(*modules)


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="A module of yours that checkpoints and exports may name; may be repeated."
            " To name a model's file is to run it.",
            callback=_allow_modules,
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks. Works anywhere on the line.")
    ] = False,
) -> None:
    """Options of all commands; `main` and the callbacks act on them."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        set_up_logging()
        _refuse_other_encodings(arguments)
        _add_groups(arguments)
        command = typer.main.get_command(app)
        _show_flags_bare(command)
        command(arguments, obj=main)  # what ranks that are forked run, see `train`
    except PibrochError as error:
        if debug:
            console.print_exception()
        leave_with(error)
    except _Stopped as stopped:
        _leave_stopped(stopped, arguments)
    except Exception as error:
        stop = _in_chain(error, _Stopped)  # extension modules that load make an ImportError of it
        if stop is not None:
            _leave_stopped(stop, arguments)
        if debug:
            console.print_exception()
        if _is_about_memory(error):
            leave_with(
                PibrochError(
                    f"no memory left: {error}",
                    "memory for what was asked for",
                    "give this machine or container more, or ask for less: fewer rows, or more"
                    " ranks or servers to share them",
                )
            )
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            leave_with(_refusal(error))
        console.print(
            f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False
        )
        console.print(
            "This is a bug in pibroch or in its surroundings. Run again with --debug for the"
            " traceback."
        )
        leave(1)
    leave(0)


def _leave_stopped(stopped: _Stopped, arguments: Sequence[str]) -> NoReturn:
    """End; an error that was on its way here is shown.

    A launcher that stops all processes because of it is no better news.
    """
    reason = _in_chain(stopped, PibrochError)
    if reason is not None:
        leave_with(reason)
    if not has_launcher():
        console.print(_how_to_go_on(arguments), markup=False)
    leave(stopped.exit_code)


def _in_chain(error: BaseException | None, kind: type[_Kind]) -> _Kind | None:
    """The error, or the nearest one that it was raised from or beside, of this kind."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _how_to_go_on(arguments: Sequence[str]) -> str:
    named = [argument for argument in arguments if not argument.startswith("-")]
    if named[:2] == ["data", "prepare"] or named[:1] == ["predict"]:
        return "stopped; the same command goes on where it was"
    return "stopped; the run goes on with --resume" if named[:1] == ["train"] else "stopped"


def _refuse_other_encodings(arguments: Sequence[str]) -> None:
    """Names that are not UTF-8 can be neither printed nor written into TOML, JSON or Parquet.

    Refused before anything is.
    """
    folder = ""
    with suppress(FileNotFoundError):  # it was removed
        folder = os.getcwd()
    for argument in (*arguments, folder):
        shown = os.fsencode(argument).decode(errors="backslashreplace")
        if shown != argument:
            raise ConfigError(
                f"{shown}, which is not UTF-8",
                "arguments and a working folder in UTF-8",
                "rename it",
            )


def _is_about_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)  # torch's


def _refusal(error: OSError) -> StorageError:
    """What the system says, for a place where nobody wrote a better message."""
    at = "" if error.filename is None else f" at {error.filename}"
    return StorageError(
        f"{error.strerror}{at}",
        "a place with room that this process may use",
        "name another, or free some space",
    )


def _add_groups(arguments: Sequence[str]) -> None:
    if "_PIBROCH_COMPLETE" in os.environ:  # a shell asks how its line may go on
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        arguments = line.split()[1:]
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, text in _GROUPS.items():
        group = (
            import_module(f"pibroch.cli.{name}").app if name == named else typer.Typer(help=text)
        )
        app.add_typer(group, name=name)


def _show_flags_bare(command: Any) -> None:
    """Have the help show a flag as what is typed.

    Typer (0.29) writes `--resume <bool>`, and `--resume true` is an error.
    """
    shown_by = command.get_help_option(command.context_class(command))
    for option in [*command.params, *([] if shown_by is None else [shown_by])]:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _show_flags_bare(inner)


def _stop(number: int, frame: FrameType | None) -> None:
    # a terminal and a launcher both send one: let what ends end
    for later in (signal.SIGINT, signal.SIGTERM):
        signal.signal(later, lambda *_: None)
    raise _Stopped(number)


if __name__ == "__main__":
    main()
