"""Being one of a role."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

from pibroch.roles import group
from pibroch.roles.role import Role


def serve_as(role: Role, meet: str, number: int, opens: bool, **options: Any) -> None:
    """Be number ``number`` of a role, beside what else this process does, until :func:`pibroch.roles.group.leave`.

    Args:
        role: which says how.
        meet: ``tcp://host:port``, where all meet.
        number: from 0.
        opens: whether this process opens the meeting place.
        options: the role's own.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when nobody opens the meeting place.
    """
    if role.serving is None:
        group.serve(role, meet, number, opens, **options)
        return
    module, _, function = role.serving.partition(":")
    attrgetter(function)(import_module(module))(meet, number, opens=opens, **options)
