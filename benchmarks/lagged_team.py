"""What the sections of the topic ``bounded_lag`` share.

Processes that are asked together, delays, intervals.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import ForeignLoad
from pibroch.ports import free_port

NUM_RANKS = 4
MOST_DELAY_S = 0.01
ANSWER_S = 900
STUDENT_95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}
"""Of the t distribution, by degrees of freedom: half a 95 % interval in standard errors."""


class RankTeam:
    """Processes of one process group, asked together.

    Args:
        size: number of ranks.
        load: they count as ours.
    """

    def __init__(self, size: int, load: ForeignLoad) -> None:
        from benchmarks.workers.lagged import serve

        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, child_pipe = context.Pipe()
            process = context.Process(
                target=serve, args=(child_pipe, rank, size, port), daemon=True
            )
            process.start()
            child_pipe.close()
            load.add_worker(process.pid or 0)
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(
        self, name: str, *arguments: Any, by_rank: list[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Let all ranks do something; their answers."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((name, (*arguments, *(by_rank[rank] if by_rank else ()))))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(ANSWER_S), f"{name}: a rank does not answer"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@contextmanager
def team_of(size: int, load: ForeignLoad) -> Iterator[RankTeam]:
    team = RankTeam(size, load)
    try:
        yield team
    finally:
        team.close()


def drawn_delays(steps: int, seed: int = 0) -> NDArray[np.float64]:
    """Delays in seconds ``[steps, ranks]``."""
    return np.random.default_rng(seed).uniform(0.0, MOST_DELAY_S, (steps, NUM_RANKS))


def half_interval(values: list[float]) -> float:
    """Half of a 95 % interval of the mean."""
    freedom = len(values) - 1
    return (
        0.0
        if freedom < 1
        else STUDENT_95.get(freedom, 1.96 + 2.4 / freedom) * stdev(values) / len(values) ** 0.5
    )


def size_name(nbytes: int) -> str:
    """Binary.

    >>> size_name(64), size_name(65536), size_name(4 << 20)
    ('64 B', '64 KiB', '4 MiB')
    """
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"
