"""The roles: ours, those of installed packages, and those that a program registers."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points

from pibroch.errors import ConfigError
from pibroch.roles import data_processor, embedding_server, oracle
from pibroch.roles.role import FIRST_TRAINER_ID, Role

BUILT_IN = (embedding_server.ROLE, oracle.ROLE, data_processor.ROLE)
ENTRY_POINTS = "pibroch.roles"
"""Group of entry points: each names a module with a ``ROLE``."""
VARIABLE = "PIBROCH_ROLES"
"""Modules with a ``ROLE``, with commas between them: those of processes that nobody installed."""

_registered: dict[str, Role] = {}


def roles() -> tuple[Role, ...]:
    """All roles of this process, in the order of their ranks behind the trainers.

    That is their order where a launcher starts them all.
    """
    by_command = {
        role.command: role for role in (*BUILT_IN, *_installed(os.environ.get(VARIABLE, "")))
    }
    return tuple((by_command | _registered).values())


def register_role(role: Role) -> None:
    """Make a role known to this process; a package has an entry point ``pibroch.roles`` instead.

    Raises:
        ConfigError: when another one has its command, its worker's name or its ids.
    """
    for other in roles():
        same = (
            other.command == role.command,
            other.worker == role.worker,
            other.block == role.block,
        )
        if other != role and any(same):
            raise ConfigError(
                f"a second role {role.command!r}", f"command, worker and block other than {other!r}"
            )
    if role.first_id == FIRST_TRAINER_ID:
        raise ConfigError(
            f"role {role.command!r} with block 1", "another one", "1 is the trainers'"
        )
    _registered[role.command] = role


@lru_cache(maxsize=4)
def _installed(named: str) -> tuple[Role, ...]:
    modules = [
        point.value
        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    ]
    modules += [name for name in named.split(",") if name]
    return tuple(import_module(module).ROLE for module in dict.fromkeys(modules))
