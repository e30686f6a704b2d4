"""The interface of exchanges, which bring a minibatch its embeddings and take their gradients.

The training thread calls an exchange; what its methods leave to other threads is its own matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from pibroch.assignment.rows_of import RowsOf
from pibroch.collectives import Channel, Ranks
from pibroch.data import JaggedBatch
from pibroch.embedding import Shard, Table, TableGroup
from pibroch.errors import ConfigError
from pibroch.exchange.schedule import Moment, Queue, Schedule, Task
from pibroch.planner import Plan
from pibroch.state.kept_rows import KeepsItself

Handle = TypeVar("Handle")
O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True)
class Setup:
    """What every exchange is made from.

    Attributes:
        groups: all tables.
        seed: of the initial weights; ``None`` to leave all rows to who writes them.
        given_channel: between the ranks, for this exchange alone; when absent the first use of
            ``channel`` opens one over all ranks of torch.distributed's group.
    """

    groups: Sequence[TableGroup]
    seed: int | None
    given_channel: Channel | None = None

    @property
    def tables(self) -> list[Table]:
        """The tables of all groups."""
        return [table for group in self.groups for table in group.space.tables]

    @cached_property
    def channel(self) -> Channel:
        """A channel between the ranks; the first use opens it, on every rank."""
        return Ranks.joined().open_channel() if self.given_channel is None else self.given_channel

    @property
    def ranks(self) -> Ranks:
        """Between which the tables lie: those of ``channel`` if it was used, else this process."""
        return self.channel.ranks if "channel" in self.__dict__ else Ranks.alone()


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and step number of an update.

    Attributes:
        learning_rates: of the step, for each group of tables.
        step: number of the update, from 1.
    """

    learning_rates: Sequence[float]
    step: int


@dataclass(slots=True)
class Report:
    """Counts of an exchange on this rank so far; zero and empty where it does not count.

    Attributes:
        lookahead: steps in force after the last planned step.
        lookahead_sum: of all planned steps.
        num_steps: planned so far.
        rows_read: distinct rows a step, summed over the planned steps.
        rows_fetched: records and weights that other ranks sent for these steps.
        bytes_by_purpose: sent to other ranks.
        bytes_by_rank: sent to each.
    """

    lookahead: int = 0
    lookahead_sum: int = 0
    num_steps: int = 0
    rows_read: int = 0
    rows_fetched: int = 0
    bytes_by_purpose: dict[str, int] = field(default_factory=dict)
    bytes_by_rank: dict[int, int] = field(default_factory=dict)


BLOCKING = Schedule(
    Task("feed", Queue.CALLER, Moment.READ),
    Task("lookup", Queue.CALLER, Moment.LOOKUP),
    Task("update", Queue.CALLER, Moment.GRADIENTS),
)
"""Of an exchange whose methods do all they are called for before they return."""


class Exchange(ABC, Generic[Handle]):
    """A strategy behind :class:`pibroch.exchange.Embeddings`; all strategies give the same numbers.

    ``Handle`` is what a lookup leaves for its update. ``docs/extending.md`` writes one. What only
    some can do is a class of its own: :class:`MovesRows`, :class:`CachesRows`.

    Attributes:
        shards: the row records that this process holds, or has in its care on servers; tables of
            one width, or blocks of columns, share a shard.
        reads_ahead: whether batches that come through :meth:`feed` are looked up sooner than
            others.
        takes_raw_ids: whether rows may begin anew with a batch (:attr:`JaggedBatch.fresh`).
        rows_of: by what samples are assigned to ranks; ``None`` where they stay as they are given.
        can_be_copied: whether pickle and ``copy.deepcopy`` make another one, with rows of its own.
    """

    shards: Sequence[Shard]
    reads_ahead: bool = False
    rows_of: RowsOf | None = None
    takes_raw_ids: ClassVar[bool] = False
    can_be_copied: ClassVar[bool] = False

    @property
    def schedule(self) -> Schedule:
        """What is done in a step of training, and when; by this it is simulated."""
        return BLOCKING

    @abstractmethod
    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], Handle]:
        """Embeddings of each group of tables, and a handle of the batch for :meth:`update`.

        Pooled ones are float32 ``[B, S]``, one tensor for all groups, in which each has its
        ``columns``; so it is there once a group. Of tables that pool nothing, and of a batch
        ``by_id``, ``[V, D]`` in the order of the batch's values. Blocks until the embeddings are
        there. The caller owns the tensors.

        Args:
            batch: with all features that some group reads; :meth:`JaggedBatch.pick` has those of
                one.
            trains: whether an :meth:`update` is to follow.
            averaged_at: pool the rows' moving averages as of this step instead of their weights.

        Raises:
            RowIdError: for an id outside its table.
        """

    @abstractmethod
    def update(self, handle: Handle, gradients: Sequence[Tensor], rates: Rates) -> None:
        """Combine the gradients of each touched row and apply the optimizer once to it.

        Args:
            handle: the second result of the batch's :meth:`lookup`.
            gradients: of what the lookup gave, a tensor for each group again, float32, contiguous;
                only read.
            rates: of this update.
        """

    def drop(self, handle: Handle, gradients: Sequence[Tensor]) -> None:
        """End a lookup without an update, on all ranks alike: no row changes.

        Gradients are finite, and otherwise do not matter.
        """

    def fetch_next(self) -> None:
        """Called at the end of a backward pass.

        What the next lookup needs may be fetched from now on.
        """

    def flush(self) -> None:
        """Wait until all updates are in the shards.

        Whoever reads or writes records in between calls it first.
        """

    def forget(self) -> None:
        """Drop what was fetched ahead, on all ranks, after records were written from outside."""

    def report(self) -> Report:
        """Counts of what was done so far; the training thread calls it."""
        return Report()

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """Pass batches on in their order.

        Strategies that look ahead read further than they have handed out.

        Args:
            batches: to come.
            trains: whether each is looked up once, in turn, and then updated.
        """
        yield from batches


class MovesRows(ABC):
    """What an exchange is, too, whose rows move to other homes while training goes on."""

    @abstractmethod
    def move_to(self, plan: Plan, rows_per_step: int) -> None:
        """See :meth:`pibroch.Embeddings.move_rows`.

        Raises:
            ConfigError: for rows that cannot move, or are on their way already.
        """

    @property
    @abstractmethod
    def is_moving(self) -> bool:
        """Whether rows are on their way to another plan's homes."""


class CachesRows(ABC):
    """What an exchange is, too, that has records where they are not at home.

    Attributes:
        caches: of this process, with these records.
    """

    caches: Sequence[KeepsItself]

    @abstractmethod
    def finish_updates(self) -> None:
        """Wait until all updates are in the shards or in ``caches``; every rank calls it."""

    @abstractmethod
    def bring_home(self) -> None:
        """Write to the shards what :meth:`KeptShard.restore` gave to ``caches``.

        Every rank calls it.
        """


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """An exchange with its options: what :class:`pibroch.Embeddings` takes beside a name.

    Each exchange has a class that derives from it, such as :class:`pibroch.Lookahead`.

    Attributes:
        exchange: the name.
    """

    exchange: ClassVar[str]

    def given(self) -> dict[str, object]:
        """The options by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class Local(ExchangeOptions):
    """One process holds all rows; there are no options."""

    exchange: ClassVar[str] = "local"


def options_of(kind: type[O], exchange: str, given: Mapping[str, object]) -> O:
    """A dataclass of an exchange's options, from those that a user gives by name.

    Raises:
        ConfigError: for an option that it does not have.
    """
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # a dataclass, by contract
    for name in given:
        if name not in names:
            raise ConfigError(
                f"option {name!r} of exchange {exchange!r}",
                f"one of {', '.join(names)}" if names else "none",
            )
    return kind(**given)
