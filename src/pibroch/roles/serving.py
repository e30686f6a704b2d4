"""Being one of a role."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

from pibroch.roles import group
from pibroch.roles.role import Role


def serve_as(role: Role, rendezvous: str, number: int, opens: bool, **options: Any) -> None:
    """Be number ``number`` of a role until :func:`pibroch.roles.group.leave`.

    The process may do other things meanwhile.

    Args:
        role: which says how.
        rendezvous: ``tcp://host:port``, where all meet.
        number: from 0.
        opens: whether this process opens the rendezvous.
        options: the role's own.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when nobody opens the rendezvous.
    """
    if role.serving is None:
        group.serve(role, rendezvous, number, opens, **options)
        return
    module, _, function = role.serving.partition(":")
    attrgetter(function)(import_module(module))(rendezvous, number, opens=opens, **options)
