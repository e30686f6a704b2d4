"""Jobs on this machine: forked from what this process has loaded, again when something is lost."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pibroch.forkserver import ForkServer, can_fork
from pibroch.launch.base import Launcher, Run
from pibroch.launch.child import LOST
from pibroch.launch.job import TRAINER, Group, Job, Place
from pibroch.launch.life import Death, Life, RestartBudget
from pibroch.launch.machines import Here, Machines, Memory, place_here
from pibroch.process import threads_of_rank

END_S = 10.0
"""How long ranks may go on after one has failed.

The others hear of it in milliseconds and give up after some seconds.
"""
LOSS_END_S = 2.0
"""The same, where all are to be started again."""
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


class LocalLauncher(Launcher):
    """Forks a job's processes, where the system can, and keeps memory for those to come."""

    def run(self, run: Run) -> int:
        """Launch a run, and again as long as something is lost and restarts are left."""
        job = run.job(is_here=True)
        if run.program is None or not can_fork():
            return run_job(job, run, _here(Here()))
        # before torch's threads are known
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(job.num_ranks)))
        with ForkServer(run.program, _compiled_kernels) as server:
            server.preload(PRELOADED)
            return run_job(job, run, _here(Here(server)), server)


def run_ranks(num_ranks: int) -> Death | None:
    """This command line as several ranks, started anew; the death that ended them, if one did."""
    ranks = Group(TRAINER, "rank", num_ranks, tuple(sys.argv[1:]), are_ranks=True)
    with Life(Job((ranks,)), place_here()) as life:
        death = life.wait()
        if death is not None:
            life.settle(END_S)
    return death


Begin = Callable[[Job], AbstractContextManager[tuple[Machines, Place]]]
"""Gives machines for one life of a job, and where its processes meet."""


def _here(machines: Machines) -> Begin:
    return lambda job: nullcontext((machines, place_here()))


def run_job(job: Job, run: Run, begin: Begin, memory: Memory | None = None) -> int:
    """Run a job, and again as long as something is lost and restarts are left.

    Args:
        job: its processes.
        run: is told what happens.
        begin: gives machines for each life.
        memory: is kept from one life to the next.
    """
    most = job.restarts.most
    budget = RestartBudget(job.restarts)
    words = Path(job.folder or "", ".last-words")
    is_again = False

    def note(death: Death) -> None:
        run.note_restart(str(death), None)

    while True:
        words.unlink(missing_ok=True)
        with (
            begin(job) as (machines, place),
            Life(job, place, machines, is_again, words, note) as life,
        ):
            first = life.wait()
            if first is None:
                return 0
            ranks = life.settle(LOSS_END_S if most else END_S)
            is_lost = any(death.is_loss for death in (first, *ranks))
            if is_lost and most:
                life.kill()
        failed = first if first.group.are_ranks or not ranks else ranks[0]
        if not is_lost or not most:
            return _exit_code(failed, job, run)
        has_words = first.group.are_ranks and first.signal is None and words.exists()
        reason = words.read_text(encoding="utf-8") if has_words else str(first)
        step = run.newest_step(None if memory is None else memory.heads)
        pause = budget.pause(time.monotonic(), step)
        if pause is None:
            run.say(f"{reason}: {most} restarts within an hour are used up (--restarts)")
            return _exit_code(failed, job, run)
        run.note_restart(reason, step, pause)
        later = f" in {pause:g} s" if pause else ""
        run.say(f"{reason}: starting again from step {step}{later}")
        least = job.least_ranks or job.num_ranks
        if budget.vain >= VAIN_RESTARTS and job.num_ranks > least:
            job = job.with_ranks(job.num_ranks - 1)
            run.say(
                f"going on with {job.num_ranks} ranks, as {budget.vain + 1} starts in turn got no"
                " further (--least-ranks)"
            )
            if memory is not None:
                memory.forget()  # what the ranks of before have kept are other rows
        time.sleep(pause)
        is_again = True


def _compiled_kernels() -> Iterator[None]:
    from pibroch.kernels import team
    from pibroch.kernels.policy import load_compiled

    team.keep_after_fork()
    yield from load_compiled()


def _exit_code(failed: Death, job: Job, run: Run) -> int:
    """Exit code of the launcher.

    Shows the end of the log where the process that failed has written nothing to the console.
    """
    log = Path(job.folder or "", failed.group.logs or "", f"{failed.number}.log")
    if failed.group.are_ranks:
        log = run.log_path(failed.number or 1)  # when rank 0 was killed, the others know
    is_silent = not failed.group.are_ranks or (failed.number > 0 and log.exists())
    if failed.signal is not None or is_silent:
        how = "exit code 1" if failed.code == LOST else failed.how
        run.say(f"{failed.group.title} {failed.number} ended with {how}; the end of {log}:")
        run.say(tail(log))
    return failed.exit_code


def tail(path: Path, num_lines: int = 20) -> str:
    """The last lines of a text file; empty when there is none."""
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
