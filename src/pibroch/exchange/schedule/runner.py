"""Runs a schedule: submits each moment's tasks to their threads and keeps what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from pibroch.errors import PibrochError
from pibroch.exchange.messages import carried
from pibroch.exchange.schedule.schedule import Before, Moment, Queue, Schedule, Task
from pibroch.observability.trace import span
from pibroch.observability.watch import watched


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """What a runner keeps of a step.

    The training thread alone changes ``tasks``. A task gets what it waits for as it was when the
    task was submitted: by the time it runs, that may have been forgotten and submitted again,
    behind it on the same thread.

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


Run = Callable[..., Any]
"""What a task does, for an exchange and a step.

Tasks of other threads than the caller's also get the results of what they wait for, ``None`` for a
task that had nothing to do. On the communication thread a task returns a generator of messages
(:data:`pibroch.exchange.messages.Joined`), whose result is the task's.
"""


class Runner(Generic[E, S]):
    """Runs one schedule; the training thread calls it.

    A task that fails hands its error to whatever waits for it: on every rank at the same task.

    Args:
        schedule: the order.
        threads: of all queues that the schedule names, but for the caller's.
        runs: what each task does, by its name. Functions, not methods of an exchange: who drops an
            exchange expects its rows' memory back at once, and a bound method here would be a
            cycle.

    Attributes:
        schedule: as given.

    Raises:
        PibrochError: for tasks that nothing runs, and functions of no task.
    """

    def __init__(
        self,
        schedule: Schedule,
        threads: Mapping[Queue, Thread],
        runs: Mapping[str, Run],
    ) -> None:
        names = {task.name for task in schedule.tasks}
        if names != runs.keys():
            raise PibrochError(
                f"functions for {', '.join(sorted(runs))}", f"for {', '.join(sorted(names))}"
            )
        self.schedule = schedule
        self._threads = threads
        self._at = {
            moment: [(task, _as_submitted(task, runs[task.name])) for task in schedule.at(moment)]
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
                inputs = [step.tasks.get(each) for each in task.after]
                submit = self._threads[task.on].submit
                step.tasks[task.name] = submit(partial(run, exchange, step, inputs))

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


def _as_submitted(task: Task, run: Run) -> Run:
    """A task as its thread runs it: it waits for others first, and sends its messages.

    Those of the training thread wait themselves, where they count the time.
    """

    def run_now(exchange: E, step: S) -> Any:
        with span(task.name):
            return watched(task.name, exchange, step, partial(run, exchange, step))

    def wait_and_run(exchange: E, step: S, inputs: Sequence[Future[Any] | None]) -> Any:
        results = [None if each is None else each.result() for each in inputs]
        with span(task.name):
            made = watched(task.name, exchange, step, partial(run, exchange, step, *results))
            if task.on is Queue.NETWORK:
                return carried(getattr(exchange, task.wire), made)
            return made

    return run_now if task.on is Queue.CALLER else wait_and_run
