"""A command for each role: ``pibroch embedding-server``, ``pibroch oracle`` and so on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import typer

from pibroch.cli.console import results
from pibroch.cli.launch import die_with_parent
from pibroch.process import threads_of_rank, tune_process
from pibroch.roles.role import Role
from pibroch.title import TITLE, name_of_role, show_as

_KEYWORD = Parameter.KEYWORD_ONLY


def command_of(role: Role) -> Callable[..., None]:
    """What the command line calls: be one of a role until the process is stopped."""

    def run(
        *,
        rendezvous: str,
        number: int,
        threads: int | None,
        until_input_ends: bool,
        with_servers: bool = False,
        **own: Any,
    ) -> None:
        title = os.environ.get(TITLE) or role.member(number)
        show_as(title, name_of_role(role.command, number))
        _tune(1 if role.is_one else threads, until_input_ends)
        from pibroch.roles.serving import serve_as

        serve_as(
            role,
            rendezvous,
            number,
            opens=number == 0 and not until_input_ends and not with_servers,
            **own,
        )
        _stay(f"{role.name(number)} is ready at {rendezvous}", until_input_ends)

    parameters = _parameters(role)
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__ = role.command.replace("-", "_")
    run.__doc__ = role.help
    return run


def _parameters(role: Role) -> list[Parameter]:
    """The options that commands of all roles have, and the role's own.

    What is there once has number and threads hidden.
    """
    word = role.title.split()[-1]
    one = role.is_one
    host = "HOST is this machine" if one else f"HOST is {word} 0's machine"
    options: dict[str, tuple[object, Any]] = {
        "rendezvous": (
            str,
            typer.Option(
                ..., help=f"tcp://HOST:PORT, the same for all. {host}, as all others reach it."
            ),
        ),
        "number": (int, _number(word, one)),
    }
    options |= {
        name: (own.kind, typer.Option(own.default, help=own.help))
        for name, own in role.options.items()
    }
    if role.first is not None:
        text = f"Meet where {role.first} opens the rendezvous."
        options["with_servers"] = bool, typer.Option(False, "--with-servers", help=text)
    text = "Threads of this process; by default as many as there are processors."
    options["threads"] = int | None, typer.Option(None, min=1, hidden=one, help=text)
    text = "For a program that starts this process, opens the rendezvous, and ends it."
    options["until_input_ends"] = bool, typer.Option(False, "--until-input-ends", help=text)
    return [
        Parameter(name, _KEYWORD, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]


def _number(word: str, one: bool) -> Any:
    if one:
        return typer.Option(0, min=0, max=0, hidden=True)
    return typer.Option(
        ..., min=0, help=f"Of this {word}: 0, 1, 2, ... Number 0 opens the rendezvous."
    )


def _tune(threads: int | None, until_input_ends: bool) -> None:
    if until_input_ends:
        die_with_parent()  # also when this process is stopped, and reads nothing
    tune_process(is_alone=False)
    import torch

    torch.set_num_threads(threads or threads_of_rank(1))


def _stay(ready: str, until_input_ends: bool) -> None:
    results.print(ready)
    sys.stdout.flush()
    if until_input_ends:
        sys.stdin.buffer.read()
    else:
        threading.Event().wait()
