"""Processes that measure this machine at once, as the ranks of a run would use it."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pibroch.collectives.ranks import Ranks
from pibroch.errors import PibrochError
from pibroch.exchange.alltoall.build import AllToAll
from pibroch.exchange.lookahead.build import Lookahead
from pibroch.exchange.towers.build import Towers
from pibroch.models.base import Model
from pibroch.process import tune_process
from pibroch.sim.counting import Job

T = TypeVar("T")
Say = Callable[[str], None]
Enter = Callable[[int], None]
TIMEOUT_S = 300.0
EXCHANGES = (AllToAll(), Lookahead(lookahead=8), Towers())
"""Whose work is measured; under towers each rank is a host."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Something to measure.

    Attributes:
        key: of the dense model, see :func:`model_key`.
        job: makes the rows and batches of two ranks; ``None`` to measure the model alone.
        model: makes the dense model.
        batch_sizes: of a rank; the first one is that of the job's batches.
    """

    key: str
    job: Callable[[int], Job] | None
    model: Callable[[], Model]
    batch_sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Party:
    """One of the processes.

    Attributes:
        ranks: all of them.
        say: told what is measured.
        barrier: of all.
    """

    ranks: Ranks
    say: Say
    barrier: Any

    def begin(self, what: str) -> None:
        """Say what all begin to measure once all are there."""
        self.barrier.wait(TIMEOUT_S)
        self.say(what)


def nowhere(_: int) -> None:
    """Enter no network."""


@contextmanager
def in_turns(
    work: Callable[[Party], Iterator[T]], num_processes: int, say: Say, enter: Enter = nowhere
) -> Iterator[Callable[[], list[T]]]:
    """Processes, forked, with one thread each, that work when asked; between turns they wait.

    Gives what asks each of them for its next answer, and blocks until all are there.

    Args:
        work: measures, answer by answer.
        num_processes: that work at once.
        say: told what the first one measures.
        enter: called first in each process, with its rank: where it is to be on a network.

    Raises:
        PibrochError: when a process ends without an answer.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="pibroch-calibrate-") as folder:
        pipes = [context.Pipe() for _ in range(num_processes)]
        barrier = context.Barrier(num_processes)

        def run(rank: int, asked: Any) -> None:
            try:
                enter(rank)
                tune_process(is_alone=False)  # as those of a run: else each step faults memory in
                torch.set_num_threads(1)
                ranks = _joined(rank, num_processes, folder)
                answers = work(Party(ranks, say if rank == 0 else _silent, barrier))
                while asked.poll(TIMEOUT_S):
                    asked.recv()
                    answer = next(answers)
                    barrier.wait(TIMEOUT_S)
                    asked.send(answer)
            except BaseException as error:
                asked.send(_Failure(f"{type(error).__name__}: {error}"))
                raise

        processes = [
            context.Process(target=run, args=(rank, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]

        def ask() -> list[T]:
            asking = [ours for ours, _ in pipes]
            for ours in asking:
                ours.send(None)
            answers = _answers(dict(zip(asking, processes, strict=True)))
            return [answers[ours] for ours in asking]

        for process in processes:
            process.start()
        try:
            yield ask
        finally:
            for process in processes:
                process.kill()
                process.join()


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _answers(waiting: dict[Any, Any]) -> dict[Any, Any]:
    """What comes by each pipe; the first failure is told, whatever the others wait for."""
    answers = {}
    while waiting:
        ready = wait(list(waiting), 1.0)
        for pipe in [each for each in waiting if each in ready]:
            answer = pipe.recv()
            if isinstance(answer, _Failure):
                raise PibrochError(f"a process that measured: {answer.text}", "an answer of it")
            answers[pipe] = answer
            del waiting[pipe]
        for pipe, process in waiting.items():
            if not process.is_alive() and not pipe.poll(0.0):
                raise PibrochError(
                    f"a process that measured and ended with {process.exitcode}", "an answer of it"
                )
    return answers


def _silent(_: str) -> None:
    pass


def _joined(rank: int, size: int, folder: str) -> Ranks:
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    return Ranks.joined()
