"""A training run as a job: its trainers, and the processes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pibroch.config import RunConfig
from pibroch.launch.job import TRAINER, Group, Job, Restarts
from pibroch.launch.roles import groups_of, rendezvous_of_roles, wanted


def training_job(
    config: RunConfig,
    folder: Path,
    arguments: Sequence[str],
    num_ranks: int,
    restarts: Restarts,
    least_ranks: int | None = None,
    threads_beside: int | None = None,
) -> Job:
    """The processes of a run.

    Where its recipe says that some of them run elsewhere already, ranks alone: rank 0 then starts
    those of the others that do not.

    Args:
        config: the resolved configuration.
        folder: of the run.
        arguments: of ``pibroch``, with which each rank trains.
        num_ranks: how many.
        restarts: of all.
        least_ranks: with how many to go on where more get no further.
        threads_beside: of each process beside the ranks.
    """
    trainers = Group(
        role=TRAINER,
        title="rank",
        count=num_ranks,
        command=(*arguments, "--run-dir", str(folder)),
        are_ranks=True,
        again=("--resume",),
    )
    is_met = any(place is not None for place in rendezvous_of_roles(config).values())
    beside = () if is_met else groups_of(wanted(config), threads_beside)
    return Job((trainers, *beside), str(folder), restarts, least_ranks)
