"""A training run as a job: its trainers, and the processes beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from pibroch.config import RunConfig
from pibroch.launch.job import TRAINER, Group, Job, Restarts
from pibroch.launch.roles import groups_of, met_at, to_start
from pibroch.process import threads_of_rank
from pibroch.train.run_directory import RunDirectory

Begin = Callable[[], tuple[RunConfig, Path]]
"""Gives the configuration and the folder of a run that begins or goes on."""
_SAVING_S = 300.0
"""How long ranks of a stream may take to save what they have trained when they are told to stop."""


def training_job(
    config: RunConfig,
    folder: Path,
    arguments: Sequence[str],
    num_ranks: int,
    restarts: Restarts,
    least_ranks: int | None = None,
    threads_beside: int | None = None,
) -> Job:
    """The processes of a run, but for those that run elsewhere already as its recipe says.

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
        threads=config.train.threads,
    )
    groups = (trainers, *groups_of(to_start(config), threads_beside))
    job = Job(groups, str(folder), restarts, least_ranks, met_at(config))
    return job if config.data.stream is None else replace(job, stop_s=_SAVING_S)


@dataclass(slots=True)
class TrainingRun:
    """A run that is to be launched, see :class:`pibroch.launch.base.Run`.

    Attributes:
        begin: gives the configuration and the folder, or says what is wrong with the input.
        train: is a rank in this process, given ``begin``.
        arguments, num_ranks, restarts, least_ranks: see :func:`training_job`.
        say: tells the user.
        program: what forked processes run, by ``sys.argv``.
    """

    begin: Begin
    train: Callable[[Begin], None]
    arguments: Sequence[str]
    num_ranks: int
    restarts: Restarts
    least_ranks: int | None
    say: Callable[[str], None]
    program: Callable[[], NoReturn] | None
    _folder: Path = Path()

    def job(self, is_here: bool) -> Job:
        """Its processes.

        Args:
            is_here: whether all share the processors of this machine.
        """
        config, self._folder = begun = self.begin()
        self.begin = lambda: begun
        num_processes = self.num_ranks + sum(to_start(config).values())
        return training_job(
            config,
            self._folder,
            self.arguments,
            self.num_ranks,
            self.restarts,
            self.least_ranks,
            threads_of_rank(num_processes) if is_here else None,
        )

    def be_rank(self) -> None:
        """Be a rank in this process, to the end."""
        self.train(self.begin)

    def newest_step(self, kept: Callable[[int], list[bytes]] | None) -> int:
        """Of its checkpoints and of what is kept in memory; 0 for none."""
        saved = RunDirectory(self._folder).newest_step()
        if kept is None:
            return saved
        import numpy as np

        from pibroch.state.kept_rows import HEAD_BYTES, newest_common, steps_in

        steps = (steps_in(np.frombuffer(head, np.uint8)) for head in kept(HEAD_BYTES))
        return max(saved, newest_common(steps) or 0)

    def note_restart(self, reason: str, from_step: int | None, pause_seconds: float = 0.0) -> None:
        """Keep that something was lost and is started again."""
        RunDirectory(self._folder).note_restart(reason, from_step, pause_seconds)

    def log_path(self, rank: int) -> Path:
        """What a rank that is not the first says."""
        return RunDirectory(self._folder).log_path(rank)
