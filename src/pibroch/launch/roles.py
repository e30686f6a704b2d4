"""Roles as groups of a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pibroch.config import RunConfig
from pibroch.launch.job import TRAINER, Group, Restarts
from pibroch.roles import roles
from pibroch.roles.registry import BUILT_IN, VARIABLE
from pibroch.roles.role import Role


def wanted(config: RunConfig) -> dict[Role, int]:
    """How many processes of each role a recipe asks for.

    Roles of which there are none are left out.
    """
    return {role: count for role in roles() if (count := role.count(config))}


def to_start(config: RunConfig) -> dict[Role, int]:
    """Of these processes those that do not run already, as far as the recipe says."""
    return {
        role: count for role, count in wanted(config).items() if role.rendezvous_of(config) is None
    }


def met_at(config: RunConfig) -> str | None:
    """Where all processes of a run meet, if its recipe says that one of them runs already."""
    places = (role.rendezvous_of(config) for role in roles())
    return next((place for place in places if place is not None), None)


def groups_of(counts: Mapping[Role, int], threads: int | None = None) -> tuple[Group, ...]:
    """Groups of a job, for so many processes of each role.

    Args:
        counts: of processes.
        threads: of each one's kernels; as many as its machine has processors when absent.
    """
    own = () if threads is None else ("--threads", str(threads))
    return tuple(
        Group(
            role=role.command,
            title=role.title,
            count=count,
            command=(role.command, *own),
            is_numbered=True,
            environment=_environment(role),
            needs=(TRAINER,),
            restarts=_restarts(role),
            threads=threads,
            logs=role.folder,
        )
        for role, count in counts.items()
        if count
    )


def _restarts(role: Role) -> Restarts | None:
    return Restarts(role.restarts, or_without=not role.is_needed) if role.restarts else None


def _environment(role: Role) -> dict[str, str]:
    """Where a program of this machine registered a role, its processes find it, too."""
    if role in BUILT_IN or VARIABLE in os.environ:
        return {}
    places = os.pathsep.join(place for place in sys.path if place)
    return {VARIABLE: role.functions, "PYTHONPATH": places}
