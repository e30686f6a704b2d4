"""What a process beside the trainers can be.

How it serves, how many a run has, and how it is described.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pibroch.config import RunConfig

LARGEST_NUMBER = 1 << 20
"""Of processes of one role."""
FIRST_TRAINER_ID = LARGEST_NUMBER


@dataclass(frozen=True, slots=True)
class RoleOption:
    """An option of one role's command.

    Attributes:
        kind: its type.
        help: what it means.
        default: when it is left out.
    """

    kind: object
    help: str
    default: object = None


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process that serves trainers.

    Attributes:
        title: as messages call one.
        worker: its name in the RPC group, before its number.
        command: of the command line, that starts one.
        functions: the module whose functions others may call there, and no other.
        block: which million of ids in the RPC group is this role's; 1 is the trainers'.
        folder: of a run's directory, for what they say.
        help: what the command's ``--help`` says.
        serving: ``module:function`` that serves beside what else its process does, called as
            ``(rendezvous, number, opens=...)`` with the command's own ``options``; when absent
            :func:`pibroch.roles.group.serve`.
        options: the command's own options, by name.
        is_one: whether there is number 0 alone, which then needs neither a number nor several
            threads.
        first: of which role number 0 opens the rendezvous where a run has that role, in words;
            ``None`` for its own.
        restarts: how often within an hour one that is lost is started again alone, as it keeps
            nothing that others need; 0 where then all have to start again.
        is_needed: whether a run cannot go on without one that is not started again.
        counted: how many of them a recipe asks for; when absent what its exchange says in
            ``helpers()``.
        rendezvous: where those of a recipe that run already are; when absent what its exchange says
            in ``helper_rendezvous()``.
        described: a title and what is done, whether by processes of this role or, without any, by
            the trainers; ``None`` where nothing is. When absent what the exchange says in
            ``duties()``.
    """

    title: str
    worker: str
    command: str
    functions: str
    block: int
    folder: str
    help: str = field(repr=False, compare=False)
    serving: str | None = field(default=None, repr=False)
    options: Mapping[str, RoleOption] = field(default_factory=dict, repr=False, compare=False)
    is_one: bool = False
    first: str | None = field(default="embedding server 0", repr=False)
    restarts: int = field(default=0, repr=False)
    is_needed: bool = field(default=True, repr=False)
    counted: Callable[[RunConfig], int] | None = field(default=None, repr=False, compare=False)
    rendezvous: Callable[[RunConfig], str | None] | None = field(
        default=None, repr=False, compare=False
    )
    described: Callable[[RunConfig], tuple[str, str] | None] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def first_id(self) -> int:
        """Number 0's id in the RPC group."""
        return self.block * LARGEST_NUMBER

    def name(self, number: int) -> str:
        """The worker that number ``number`` is."""
        return f"{self.worker}{number}"

    def member(self, number: int, count: int | None = None) -> str:
        """Number ``number`` in words, of so many where that is known."""
        if self.is_one:
            return self.title
        return f"{self.title} {number}" + (f" of {count}" if count else "")

    def count(self, config: RunConfig) -> int:
        """How many of them a run has."""
        if self.counted:
            return self.counted(config)
        return config.embedding.exchange.helpers().get(self.command, 0)

    def rendezvous_of(self, config: RunConfig) -> str | None:
        """Where those are met that run already."""
        if self.rendezvous:
            return self.rendezvous(config)
        return config.embedding.exchange.helper_rendezvous()

    def describe(self, config: RunConfig) -> tuple[str, str] | None:
        """Who does this role's work in a run, and what it is; ``None`` where there is none."""
        if self.described:
            return self.described(config)
        duty = config.embedding.exchange.duties().get(self.command)
        return None if duty is None else (self.title, duty)
