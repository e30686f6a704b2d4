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
from pibroch.launch.child import die_with_launcher, is_orphan
from pibroch.process import RENDEZVOUS, threads_of_rank, tune_process
from pibroch.roles.role import Role
from pibroch.title import TITLE, name_of_role, show_as

_KEYWORD = Parameter.KEYWORD_ONLY
_LOOK_S = 1.0


def command_of(role: Role) -> Callable[..., None]:
    """What the command line calls: be one of a role until the process is stopped."""

    def run(
        *, rendezvous: str, number: int, threads: int | None, with_servers: bool = False, **own: Any
    ) -> None:
        title = None if role.is_one else os.environ.get(TITLE)
        show_as(title or role.member(number), name_of_role(role.command, number))
        die_with_launcher()
        _tune(1 if role.is_one else threads)
        from pibroch.roles.group import serve_as

        serve_as(
            role,
            rendezvous,
            number,
            opens=number == 0 and RENDEZVOUS not in os.environ and not with_servers,
            **own,
        )
        _stay(f"{role.name(number)} is ready at {rendezvous}")

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
                ...,
                envvar=RENDEZVOUS,  # of a launcher: rank 0 opens it
                show_envvar=False,
                help=f"tcp://HOST:PORT, the same for all. {host}, as all others reach it.",
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


def _tune(threads: int | None) -> None:
    tune_process(is_alone=False)
    import torch

    torch.set_num_threads(threads or threads_of_rank(1))


def _stay(ready: str) -> None:
    results.print(ready)
    sys.stdout.flush()
    forever = threading.Event()
    while not is_orphan():  # where the system does not kill those whose launcher is gone
        forever.wait(_LOOK_S)
