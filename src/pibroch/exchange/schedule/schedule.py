"""The order of a training step as data: tasks, the thread that runs each, and what it waits for.

A step passes through five *moments* of the training thread (:class:`Moment`). Each moment submits
the tasks that name it, in their order; each thread runs what was submitted to it, first in, first
out. So the order of messages follows from the schedule alone and is the same on all ranks. A run
executes a schedule (:mod:`pibroch.exchange.schedule.runner`), and the simulator hangs costs on the
same tasks (:mod:`pibroch.sim.steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from pibroch.errors import PibrochError


class Queue(Enum):
    """The thread that runs a task; the value is its name in tables."""

    CALLER = "training thread"
    PLANNER = "planner thread"
    ORACLE = "oracle"
    """Asked by the training thread; it may live in another process."""
    NETWORK = "communication thread"
    IDS = "ids thread"
    """Of raw ids alone."""


class Moment(IntEnum):
    """When the training thread submits a step's tasks, in the order in which a step meets them."""

    READ = 0
    """Its batch was read from the feed."""
    TURN = 1
    """The backward pass of the step before has ended."""
    LOOKUP = 2
    """The model asks for its embeddings."""
    GRADIENTS = 3
    """Inside its backward pass, the gradients of the embeddings are there."""
    END = 4
    """Its backward pass has ended."""

    def __str__(self) -> str:
        return self.name.lower()


FAR_AHEAD = 1_000_000
"""As a distance: the last step that was read ahead."""
Before = tuple[str, int]
"""A task of another step: its name, and how far away that step is; -1 is the one before."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that is done in each step.

    Attributes:
        name: unique in its schedule.
        on: the thread that runs it.
        at: the moment at which it is submitted.
        after: what it waits for: tasks of the same step by name, tasks of other steps with their
            distance. Order within one thread needs no entry.
        only_if: an attribute of the step; where it is false there is nothing to do.
        wire: the exchange's attribute that carries the messages of a task of the communication
            thread.
    """

    name: str
    on: Queue
    at: Moment
    after: Sequence[str | Before] = ()
    only_if: str | None = None
    wire: str = "wire"


class Schedule:
    """The tasks of a step in the order of their submission.

    Args:
        *tasks: a moment's tasks side by side, moments in their order.

    Attributes:
        tasks: all of them.

    Raises:
        PibrochError: for two tasks of one name, moments out of order, and a task that waits for
            what does not exist or is submitted later.

    Example:
        >>> print(
        ...     Schedule(
        ...         Task("fetch", Queue.NETWORK, Moment.TURN),
        ...         Task("pool", Queue.CALLER, Moment.LOOKUP, after=("fetch",)),
        ...     )
        ... )
        | moment | training thread | communication thread |
        |---|---|---|
        | turn | | fetch |
        | lookup | pool (after fetch) | |
    """

    def __init__(self, *tasks: Task) -> None:
        self.tasks = tasks
        self._at = {moment: [each for each in tasks if each.at == moment] for moment in Moment}
        names = [each.name for each in tasks]
        if len(set(names)) < len(names) or [*tasks] != sorted(tasks, key=lambda each: each.at):
            raise PibrochError(
                f"the tasks {', '.join(names)}", "distinct names, moments in their order"
            )
        for number, task in enumerate(tasks):
            for each in task.after:
                name, distance = (each, 0) if isinstance(each, str) else each
                earlier = names[:number] if distance == 0 else names
                # a later step's tasks are there in time only if reading ahead submits them
                is_there = name in earlier and (
                    distance <= 0 or tasks[names.index(name)].at == Moment.READ
                )
                if not is_there:
                    raise PibrochError(
                        f"{task.name!r} after {each!r}", "a task that is submitted before it"
                    )

    def at(self, moment: Moment) -> Sequence[Task]:
        """The tasks that a moment submits, in their order."""
        return self._at[moment]

    def __str__(self) -> str:
        """A table in Markdown: a row for each moment, a column for each thread."""
        queues = [queue for queue in Queue if any(each.on is queue for each in self.tasks)]
        rows = [["moment", *(queue.value for queue in queues)], ["---"] * (len(queues) + 1)]
        for moment in Moment:
            if self._at[moment]:
                cells = [
                    ", ".join(_shown(each) for each in self._at[moment] if each.on is queue)
                    for queue in queues
                ]
                rows.append([str(moment), *cells])
        return "\n".join(_row(row) for row in rows)


def _row(cells: Sequence[str]) -> str:
    if cells[0] == "---":
        return f"|{'|'.join(cells)}|"
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _shown(task: Task) -> str:
    names = []
    for each in task.after:
        if isinstance(each, str):
            names.append(each)
        else:
            name, distance = each
            step = {-1: "the step before", FAR_AHEAD: "the last step read"}.get(
                distance, f"step {distance:+}"
            )
            names.append(f"{name} of {step}")
    notes = [f"after {', '.join(names)}"] * bool(names)
    notes += [f"if {task.only_if}"] * bool(task.only_if)
    return f"{task.name} ({', '.join(notes)})" if notes else task.name
