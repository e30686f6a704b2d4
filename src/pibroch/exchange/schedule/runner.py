"""Runs a schedule: submits each moment's tasks to their threads and keeps what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from pibroch.errors import PibrochError
from pibroch.exchange.schedule.schedule import Before, Moment, Queue, Schedule, Task


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """What a runner keeps of a step.

    The training thread alone adds to ``tasks``. It submits a task behind those that the task waits
    for, so the task's thread finds their futures here.

    Attributes:
        tasks: what its tasks return, and those of the step before that it waits for.
    """

    tasks: dict[str | Before, Future[Any]] = field(default_factory=dict, init=False)


E = TypeVar("E")
S = TypeVar("S", bound=ScheduledStep)


class Thread(Protocol):
    """Runs tasks one after the other."""

    def submit(self, task: Callable[[], Any], /) -> Future[Any]:
        """Run a task after all earlier ones; returns at once."""


Run = Callable[[E, S], Any]
"""What a task does, for an exchange and a step."""


class Runner(Generic[E, S]):
    """Runs one schedule; the training thread calls it.

    A task that fails hands its error to whatever waits for it: on every rank at the same task.

    Args:
        schedule: the order.
        threads: of all queues that the schedule names, but for the caller's.
        runs: what each task does, by its name. Functions, not methods of an exchange: who drops an
            exchange expects its rows' memory back at once, and a bound method here would be a
            cycle.

    Raises:
        PibrochError: for tasks that nothing runs, and functions of no task.
    """

    def __init__(
        self,
        schedule: Schedule,
        threads: Mapping[Queue, Thread],
        runs: Mapping[str, Run[E, S]],
    ) -> None:
        names = {task.name for task in schedule.tasks}
        if names != runs.keys():
            raise PibrochError(
                f"functions for {', '.join(sorted(runs))}", f"for {', '.join(sorted(names))}"
            )
        self._threads = threads
        self._at = {
            moment: [(task, _waiting(task, runs[task.name])) for task in schedule.at(moment)]
            for moment in Moment
        }
        self._of_step_before = {
            each
            for task in schedule.tasks
            for each in task.after
            if not isinstance(each, str) and each[1] < 0
        }

    def at(self, moment: Moment, exchange: E, step: S) -> None:
        """A moment of a step has come: submit its tasks, run those of the training thread.

        What was submitted earlier stays as it is.
        """
        for task, run in self._at[moment]:
            if task.name in step.tasks or (task.only_if and not getattr(step, task.only_if)):
                continue
            if task.on is Queue.CALLER:
                done: Future[Any] = Future()
                done.set_result(run(exchange, step))
                step.tasks[task.name] = done
            else:
                step.tasks[task.name] = self._threads[task.on].submit(partial(run, exchange, step))

    def wait(self, moment: Moment, step: S) -> None:
        """Wait until a moment's tasks are done.

        Raises:
            Exception: of the first one that failed.
        """
        for task, _ in self._at[moment]:
            if task.name in step.tasks:
                step.tasks[task.name].result()

    def forget(self, moment: Moment, step: S) -> None:
        """Let a moment's tasks be submitted again; what they returned is dropped."""
        for task, _ in self._at[moment]:
            step.tasks.pop(task.name, None)

    def follow(self, before: S, step: S) -> None:
        """Give a step the futures of the step before that its tasks wait for."""
        for each in self._of_step_before:
            step.tasks[each] = before.tasks[each[0]]


def _waiting(task: Task, run: Run[E, S]) -> Run[E, S]:
    """``run`` after what the task waits for.

    Those of the training thread wait themselves, where they count the time.
    """
    if task.on is Queue.CALLER or not task.after:
        return run

    def wait_and_run(exchange: E, step: S) -> Any:
        for each in task.after:
            # a task that had nothing to do is not there
            if each in step.tasks:
                step.tasks[each].result()
        return run(exchange, step)

    return wait_and_run
