"""Start the processes of a run, and again from the newest checkpoint when one is lost."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pibroch.cli.console import console
from pibroch.cli.launch import END_S, LOSS_END_S, LOST, RankProcesses, signal_of, tail
from pibroch.forkserver import ForkServer, can_fork
from pibroch.process import LAST_WORDS, threads_of_rank

DEFAULT_RESTARTS = 10
"""Of several ranks."""
WINDOW_S = 3600.0
LONGEST_PAUSE_S = 30.0
VAIN_RESTARTS = 2
"""In turn, after which fewer ranks go on where they may."""
PRELOADED = (
    "torch.distributed",
    "torch._dynamo",
    "pibroch.train.run",
    "pibroch.rpc.api",
    "pibroch.servers.server",
    "pibroch.roles.group",
)
"""What all processes of a run import; torch's optimizers want the second."""


@dataclass(slots=True)
class RestartBudget:
    """Whether, and when, to start again what was lost.

    So many times within an hour, and later where nothing was gained.

    >>> budget, now = RestartBudget(most=3), 0.0
    >>> [budget.pause(step, now) for step in (5, 5, 5, 9)]
    [0.0, 1.0, 2.0, None]
    >>> budget.pause(9, now + WINDOW_S + 1)
    1.0
    """

    most: int
    vain: int = 0
    """Restarts in turn that brought no new checkpoint or cut."""
    _times: deque[float] = field(default_factory=deque)
    _step: int | None = None

    def pause(self, step: int, now: float) -> float | None:
        """Seconds to wait before the next start; ``None`` when no more are left.

        Args:
            step: of the newest checkpoint.
            now: monotonic seconds.
        """
        while self._times and now - self._times[0] > WINDOW_S:
            self._times.popleft()
        self.vain = self.vain + 1 if step == self._step else 0
        self._step = step
        if len(self._times) >= self.most:
            return None
        self._times.append(now)
        return min(LONGEST_PAUSE_S, 2.0 ** (self.vain - 1)) if self.vain else 0.0


def supervise(
    num_ranks: int,
    folder: Path,
    restarts: int,
    least_ranks: int | None = None,
    command_line: Callable[[], NoReturn] | None = None,
) -> int:
    """Run this command line as several ranks, again and again as long as something is lost.

    Returns an exit code.

    Args:
        num_ranks: how many.
        folder: of the run.
        restarts: in an hour, at most.
        least_ranks: with how many to go on where more do not get further; always all when absent.
        command_line: what forked ranks run; without it ranks are started anew, not forked.
    """
    least_ranks = least_ranks or num_ranks
    if command_line is None or not can_fork():
        return _supervise(num_ranks, folder, restarts, least_ranks, None)
    # before torch's threads are known
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(num_ranks)))
    with ForkServer(command_line, _compiled_kernels) as server:
        server.preload(PRELOADED)
        return _supervise(num_ranks, folder, restarts, least_ranks, server)


def _supervise(
    num_ranks: int, folder: Path, restarts: int, least_ranks: int, server: ForkServer | None
) -> int:
    from pibroch.train.run_directory import RunDirectory

    budget = RestartBudget(restarts)
    more = list[str]()
    words = folder / ".last-words"
    while True:
        words.unlink(missing_ok=True)
        variables = {LAST_WORDS: str(words)}
        with RankProcesses(
            num_ranks, ["--run-dir", str(folder), *more], variables, server
        ) as processes:
            failed = processes.wait(LOSS_END_S if restarts else END_S)
            if failed is None:
                return 0
            is_lost = processes.has_lost()
            if is_lost and restarts:
                processes.kill()
        reason = _reason(failed, words)
        code = _exit_code(failed, folder)
        if not is_lost or not restarts:
            return code
        step = max(newest_step(folder), 0 if server is None else kept_step(server))
        pause = budget.pause(step, time.monotonic())
        if pause is None:
            _say(f"{reason}: {restarts} restarts within an hour are used up (--restarts)")
            return code
        RunDirectory(folder).note_restart(reason, step, pause)
        _say(f"{reason}: starting again from step {step}" + (f" in {pause:g} s" if pause else ""))
        if budget.vain >= VAIN_RESTARTS and num_ranks > least_ranks:
            num_ranks = max(least_ranks, num_ranks - 1)
            _say(
                f"going on with {num_ranks} ranks, as {budget.vain + 1} starts in turn got no"
                " further (--least-ranks)"
            )
            if server is not None:
                server.forget()  # what the ranks of before have kept are other rows
        time.sleep(pause)
        more = ["--resume"]


def _compiled_kernels() -> Iterator[None]:
    from pibroch.kernels import team
    from pibroch.kernels.policy import load_compiled

    team.keep_after_fork()
    yield from load_compiled()


def newest_step(folder: Path) -> int:
    """Of the checkpoints of a run, 0 for none."""
    names = [
        path.name
        for place in ("checkpoints", "recovery")
        for path in (folder / place).glob("step-*")
    ]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)


def kept_step(server: ForkServer) -> int:
    """Of the newest cut in memory from which all can go on, 0 for none."""
    import numpy as np

    from pibroch.embedding.kept_rows import HEAD_BYTES, newest_common, steps_in

    heads = server.heads(HEAD_BYTES)
    return newest_common(steps_in(np.frombuffer(head, np.uint8)) for head in heads) or 0


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _reason(failed: tuple[int, int], words: Path) -> str:
    """What was lost, as far as is known."""
    rank, code = failed
    name = signal_of(code)
    if name is not None:
        return f"rank {rank} ended with signal {name}"
    return (
        words.read_text(encoding="utf-8")
        if words.exists()
        else f"rank {rank} ended with exit code {code}"
    )


def _exit_code(failed: tuple[int, int], folder: Path) -> int:
    """Exit code of the launcher.

    Shows the end of the log where the rank that failed has written nothing to the console.
    """
    from pibroch.train.run_directory import RunDirectory

    rank, code = failed
    log = RunDirectory(folder).log_path(rank or 1)  # when rank 0 was killed, the others know
    name = signal_of(code)
    if name is not None or (rank > 0 and log.exists()):  # else rank 0 has said why
        how = f"exit code {1 if code == LOST else code}" if name is None else f"signal {name}"
        _say(f"rank {rank} ended with {how}; the end of {log}:")
        _say(tail(log))
    if code == LOST:
        return 1
    return code if code > 0 else 128 - code
