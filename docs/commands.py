"""The commands of ``pibroch`` as a page, from what their ``--help`` is made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from click import Command, Context, Parameter


def describe_commands() -> str:
    """A section for each command that is not hidden.

    Its text, its usage, and a table of its options.
    """
    return "\n".join(
        line for name, command, context in commands() for line in section(name, command, context)
    )


def commands() -> Iterator[tuple[str, Command, Context]]:
    """All commands by their full name, groups taken apart."""
    import typer

    from pibroch.cli import main

    app = typer.Typer(add_completion=False, callback=main._common)
    app.registered_commands = main.app.registered_commands
    for group in main._GROUPS:
        app.add_typer(import_module(f"pibroch.cli.{group}").app, name=group)
    yield from _below(typer.main.get_command(app), "pibroch", None)


def _below(
    command: Command, name: str, parent: Context | None
) -> Iterator[tuple[str, Command, Context]]:
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
    inner = getattr(command, "commands", {})
    if not inner or getattr(command, "invoke_without_command", False):
        yield name, command, context
    for each in inner.values():
        if not each.hidden:
            yield from _below(each, f"{name} {each.name}", context)


def section(name: str, command: Command, context: Context) -> list[str]:
    """Markdown of a command."""
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f"## {name}",
        "",
        "```text",
        f"{name} {usage}",
        "```",
        "",
        escape(command.help or ""),
        "",
    ]
    rows = [row for each in shown if (row := describe(each, context)) is not None]
    return [*lines, "| | |", "|---|---|", *rows, ""] if rows else lines


def describe(parameter: Parameter, context: Context) -> str | None:
    """A row of the table: what is typed, what it means, what it is when left out."""
    typed = " ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        typed = f"`{(parameter.metavar or parameter.name or '').upper()}`"
    said = escape(getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    default = parameter.get_default(context, call=False)
    if default not in (None, False, (), [], "") and not callable(default):
        said += f" Default: `{default}`."
    return f"| {typed} | {said} |"


def escape(text: str) -> str:
    """What Markdown would take for its own."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("\b\n", "")


if __name__ == "__main__":
    sys.stdout.write(describe_commands())
