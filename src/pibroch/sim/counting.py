"""What ranks do in some steps of training, counted while all of them run in this process.

They are :class:`pibroch.Embeddings` under any exchange, a thread each (:mod:`pibroch.sim.world`).
What is counted are bytes from rank to rank of each message, and what the work between messages is
about, whose time a :class:`~pibroch.sim.machine.Machine` knows. The work is timed as well: that is
how a machine is calibrated, and all that is known of work that no machine's file has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isgenerator
from itertools import chain, islice, pairwise, repeat
from itertools import count as from_zero
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch, Loader
from pibroch.embedding import TableGroup
from pibroch.embedding.shard import rows_made_by
from pibroch.exchange import Embeddings
from pibroch.exchange.alltoall.build import AllToAll, PlacedOptions
from pibroch.exchange.base import BLOCKING, Exchange, ExchangeOptions
from pibroch.exchange.layout import lay_out
from pibroch.exchange.lookahead.build import Lookahead
from pibroch.exchange.lookahead.exchange import LookaheadExchange
from pibroch.exchange.messages import Message, MixedRows, Received, Rows
from pibroch.exchange.output import EmbeddingOutput
from pibroch.exchange.schedule import FAR_AHEAD, Schedule
from pibroch.exchange.towers.build import TowerLayout, Towers
from pibroch.exchange.towers.exchange import TowersExchange
from pibroch.exchange.towers.places import hosts_of
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints, Records
from pibroch.observability.watch import watched, watching
from pibroch.planner import Plan
from pibroch.sim.cluster import Flow
from pibroch.sim.operation import FEATURES, Operation, Work, bytes_to_each, of_all_ranks, tensor_of
from pibroch.sim.task_sizes import TaskSizes, is_known
from pibroch.sim.towers import PlacedModules, plan_of
from pibroch.sim.world import VirtualRanks, VirtualWorld

T = TypeVar("T")
BatchOf = Callable[[int, int], JaggedBatch]
"""Gives the part of a rank of the global batch of a step."""
GRADIENT = 1e-3
"""The size of gradients of embeddings."""
ALL_SLOTS = 1 << 62
STEPS_BEFORE_TIMES = 4
"""In which kernels are loaded, and caches fill."""
STEPS_OF_RAW_IDS = 128
"""After which most ids of a batch have been seen before, as in the midst of a run."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and on which ranks.

    Attributes:
        groups: of all tables.
        plan: where their rows lie.
        batch_of: the batches.
        exchange: with its options, in which the plan is left out; or by name.
        options: of one by name.
        modules: of towers, where they run between lookup and model.
        seed: of the rows; ``None`` where only bytes are wanted: then rows and messages take no
            memory, and what is in them may be anything.
        ranks_per_host: so many consecutive ones.
        loader_of: gives a rank's batches in place of ``batch_of``.
        every_batch: gives all samples of training, each once, where more ranks are predicted than
            are counted.
    """

    groups: Sequence[TableGroup]
    plan: Plan
    batch_of: BatchOf
    exchange: ExchangeOptions | str = field(default_factory=AllToAll)
    options: Mapping[str, Any] = field(default_factory=dict)
    modules: PlacedModules | None = None
    seed: int | None = None
    ranks_per_host: int = 1
    loader_of: Callable[[int], Loader] | None = None
    every_batch: Callable[[], Iterator[JaggedBatch]] = lambda: iter(())

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.plan.num_shards

    @property
    def width(self) -> float:
        """Floats of the mean row."""
        layouts = (lay_out(each.space, self.plan, 0) for each in self.groups)
        return float(np.mean([layout.width for of_group in layouts for layout in of_group]))

    def under(self, exchange: ExchangeOptions) -> Job:
        """The same samples under another exchange; under towers each keeps to its hosts."""
        plan = self.plan
        if isinstance(exchange, Towers):
            hosts = hosts_of(self.num_ranks, exchange.ranks_per_host or self.ranks_per_host)
            plan = plan_of(TowerLayout.of(exchange, self.groups, hosts))
        return replace(self, exchange=exchange, plan=plan)

    @property
    def has_numbers(self) -> bool:
        """Whether rows, embeddings and gradients are made, and not counted alone."""
        return self.seed is not None

    def embeddings(self, ranks: VirtualRanks) -> Embeddings:
        """Those of a rank."""
        tables = [table for group in self.groups for table in group.space.tables]
        optimizers = {
            table.name: group.optimizer for group in self.groups for table in group.space.tables
        }
        exchange = self.exchange
        if isinstance(exchange, PlacedOptions):
            exchange = replace(exchange, placement=self.plan, plan=None)
        if isinstance(exchange, Lookahead) and exchange.cache_rows is None:
            # what is free here says nothing about the ranks' machines
            exchange = replace(exchange, cache_rows=ALL_SLOTS)
        channel = ranks.open_channel()
        return Embeddings(tables, optimizers, exchange, self.seed, channel, **self.options)

    def batches(self, rank: int, embeddings: Embeddings) -> Iterator[JaggedBatch]:
        """Those of a rank, without end; reading them is watched."""
        if self.loader_of is None:
            read = (partial(self.batch_of, step, rank) for step in from_zero())
        else:
            loader = embeddings.assign(self.loader_of(rank))
            batches = chain.from_iterable(repeat(loader))  # epoch by epoch
            read = (partial(next, batches) for _ in from_zero())
        for each in read:
            yield watched("read", embeddings.exchange, None, each)


@dataclass(frozen=True, slots=True)
class StepCount:
    """One step of all ranks.

    Attributes:
        schedule: of its tasks.
        operations: that it takes.
        num_slots: in use on each rank after it, for records whose home is elsewhere and weights
            that are borrowed.
        held: bytes of memory that each rank holds in it beside rows, by what they are, ``[W]``.
    """

    schedule: Schedule
    operations: Sequence[Operation]
    num_slots: NDArray[np.int64] | None = None
    held: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Operation:
        """The operation of this name."""
        return next(each for each in self.operations if each.name == name)

    def has(self, name: str) -> bool:
        """Whether there is an operation of this name."""
        return any(each.name == name for each in self.operations)

    @property
    def sent(self) -> Ints:
        """Bytes from rank to rank, ``[W, W]``, dense gradients left out; all ranks counted."""
        parts = [
            sent for each in self.operations for sent in each.sent if not isinstance(sent, Flow)
        ]
        total: Ints = np.sum(parts, axis=0, dtype=np.int64)
        return total


def count(job: Job, num_steps: int, warm_up: int | None = None) -> list[StepCount]:
    """Steps of all ranks, one by one.

    Args:
        job: what is trained.
        num_steps: that are counted.
        warm_up: steps before them. When absent as many as are looked ahead, after which as many
            rows come as go, :data:`STEPS_OF_RAW_IDS` where ids are learned, and
            :data:`STEPS_BEFORE_TIMES` of an exchange whose methods are timed as a whole.

    Raises:
        ConfigError: for an exchange that cannot be.
    """
    answer = None if job.has_numbers else _AnyNumbers().answer
    accounts = [RankAccount(rank, job.num_ranks, answer) for rank in range(job.num_ranks)]
    world = VirtualWorld(job.num_ranks, job.ranks_per_host, dict(enumerate(accounts)))
    take_steps(job, world, num_steps, warm_up)
    return [
        of_step([each.steps[number] for each in accounts], accounts[0])
        for number in sorted(accounts[0].steps)
    ]


def take_steps(job: Job, world: VirtualWorld, num_steps: int, warm_up: int | None = None) -> None:
    """Have the ranks of a world, whose accounts are :class:`RankAccount`, train for some steps."""

    def program(ranks: VirtualRanks) -> None:
        account: RankAccount = world.account_of(ranks.rank)
        account.train(job, ranks, num_steps, warm_up)

    with ExitStack() as stack:
        stack.enter_context(watching(_ByThread()))
        if not job.has_numbers:
            stack.enter_context(rows_made_by(one_record))
        world.run(program)


Answers = Callable[[Message, RowWire], Tensor | None]
"""Answers a message in place of the other ranks; ``None`` where these do."""


class _AnyNumbers:
    """Answers messages of rows, gradients and embeddings, whose numbers nobody wants.

    They say how many come, so what a rank does with them needs no other rank, and goes on at once:
    however many ranks are counted, the numbers of one are there. All messages share their memory.
    """

    def __init__(self) -> None:
        self._bytes = torch.zeros(0, dtype=torch.uint8)

    def answer(self, message: Message, _: RowWire) -> Tensor | None:
        """See :data:`Answers`."""
        if isinstance(message, MixedRows):
            return torch.from_numpy(message.received)
        if not isinstance(message, Rows):
            return None
        if message.out is not None:
            return message.out
        shape = (sum(message.receive_counts), *message.values.shape[1:])
        num_bytes = int(np.prod(shape)) * message.values.itemsize
        if num_bytes > len(self._bytes):
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(message.values.dtype).view(shape)


def one_record(num_rows: int, width: int) -> Records:
    """Rows that are all the same record in memory, however many; each can be written.

    >>> rows = one_record(1 << 40, 16)
    >>> rows[7] = 1
    >>> float(rows[1 << 39, 3])
    1.0
    """
    return as_strided(np.zeros((1, width), np.float32), (num_rows, width), (0, 4))


@dataclass(slots=True)
class RankStep:
    """What one rank does in a step.

    Attributes:
        works: by name.
        num_slots, held: see :class:`StepCount`.
    """

    works: dict[str, Work] = field(default_factory=dict)
    num_slots: int | None = None
    held: dict[str, int] = field(default_factory=lambda: {"messages": 0})


def of_step(steps: Sequence[RankStep], account: RankAccount) -> StepCount:
    """One step, from those of all ranks, of which one's account is given."""
    nothing = Work(len(steps))
    operations = [
        of_all_ranks(name, [step.works.get(name, nothing) for step in steps], account.is_known)
        for name in steps[0].works
    ]
    slots = None if steps[0].num_slots is None else np.array([each.num_slots for each in steps])
    held = of_ranks([step.held for step in steps], operations)
    return StepCount(account.schedule, operations, slots, held)


def of_ranks(
    held: Sequence[Mapping[str, int]], operations: Sequence[Operation]
) -> dict[str, NDArray[np.float64]]:
    """What each rank holds by name, ``[W]``, with its largest message going out and coming in."""
    names = dict.fromkeys(name for own in held for name, size in own.items() if size)
    whole = {name: np.array([own.get(name, 0) for own in held], float) for name in names}
    bytes_in, bytes_out = (FEATURES.index(name) for name in ("bytes_in", "bytes_out"))
    largest = np.zeros(len(held))
    for each in operations:
        for before, after in pairwise(each.parts if each.sent else ()):
            largest = np.maximum(largest, before[:, bytes_out] + after[:, bytes_in])
    whole["messages"] = whole.get("messages", 0) + largest
    return whole


_here = threading.local()


class _ByThread:
    """The account of the rank whose thread this is."""

    def work(self, name: str, exchange: object, step: object, run: Callable[[], T]) -> T:
        """See :class:`pibroch.observability.watch.Watcher`."""
        account: RankAccount | None = getattr(_here, "account", None)
        return run() if account is None else account.work(name, step, run)


class RankAccount:
    """One rank's account of its steps; its thread keeps it.

    Args:
        rank: which.
        size: W.
        answer: answers its messages; the other ranks do when absent.

    Attributes:
        schedule: of its exchange.
        is_known: whether that is one of pibroch's.
        steps: those that were counted, by number.
    """

    schedule: Schedule
    is_known: bool
    _exchange: Exchange[Any]
    _wires: Mapping[str, str]
    _compresses: bool
    _looks_far: bool
    _width: float
    _sizes: TaskSizes

    def __init__(self, rank: int, size: int, answer: Answers | None = None) -> None:
        self.rank = rank
        self.size = size
        self.steps: dict[int, RankStep] = {}
        self._answer = answer
        self._number = -1  # of the step under way
        self._counted = range(0)
        self._num_read = 0
        self._num_begun = 0
        self._begun: dict[int, tuple[object, int]] = {}
        self._working: list[Work] = []
        self._since = 0.0

    def train(self, job: Job, ranks: VirtualRanks, num_steps: int, warm_up: int | None) -> None:
        """Take steps, and count those after ``warm_up``."""
        _here.account = self
        embeddings = job.embeddings(ranks)
        exchange = embeddings.exchange
        if isinstance(exchange, TowersExchange) and job.modules is not None:
            exchange.place_modules()
        usual = 0 if embeddings.raw_ids is None else STEPS_OF_RAW_IDS
        if exchange.schedule is BLOCKING:  # known by its times
            usual = max(usual, STEPS_BEFORE_TIMES)
        if isinstance(exchange, LookaheadExchange):
            exchange.reads_at_first = exchange.lookahead
            usual = max(usual, exchange.lookahead + 1)
        warm_up = usual if warm_up is None else warm_up
        self.schedule = exchange.schedule
        self.is_known = is_known(exchange)
        self._looks_far = looks_far(exchange.schedule)
        self._exchange = exchange
        self._wires = {task.name: task.wire for task in exchange.schedule.tasks}
        self._compresses = getattr(getattr(exchange, "wire", None), "compress", False)
        self._counted = range(warm_up, warm_up + num_steps)
        self._width = job.width
        self._sizes = TaskSizes(exchange, self._width)
        feed = embeddings.feed(job.batches(self.rank, embeddings))
        if exchange.schedule is BLOCKING:
            feed = _watched_feed(feed, embeddings)
        for number, batch in enumerate(islice(feed, self._counted.stop)):
            self._number = number
            _take_step(embeddings, batch, job.modules, job.has_numbers)
        del self._exchange, self._sizes  # and all that they hold
        self._begun.clear()

    def work(self, name: str, step: object, run: Callable[[], T]) -> T:
        """Do a piece of work; see :class:`pibroch.observability.watch.Watcher`."""
        number = self._number_of(name, step)
        work = Work(self.size, self._compresses)
        of_step = None
        if number in self._counted:
            of_step = self.steps.setdefault(number, RankStep())
            of_step.works[name] = work
        self._sizes.begin(name, step)
        made = self._timed(work, run)
        if isgenerator(made):
            end = partial(self._end, name, step, work, of_step)
            return self._messages(name, work, made, end)  # type: ignore[return-value]  # as was made
        self._end(name, step, work, of_step, made)
        return made

    def _number_of(self, name: str, step: object) -> int:
        """Of which step work is; of a feed that looks far ahead, what is done beside one is its."""
        if name == "read":
            self._num_read += 1
            return self._number + 1 if self._looks_far else self._num_read - 1
        if self._looks_far or step is None:
            return self._number
        if id(step) not in self._begun:  # steps begin in the order of their numbers
            self._begun[id(step)] = step, self._num_begun
            self._num_begun += 1
        return self._begun[id(step)][1]

    def _end(
        self, name: str, step: object, work: Work, of_step: RankStep | None, result: object
    ) -> None:
        self._sizes.end(name, step, result, work.parts)
        if name == self.schedule.tasks[-1].name:  # and with it goes what it holds
            self._begun.pop(id(step), None)
        if of_step is None:
            return
        of_step.held["messages"] += self._sizes.messages_held(name, step, result)
        if name in ("combine", "take", "lookup"):
            of_step.held |= self._sizes.held(step)
        if name == "plan":
            of_step.num_slots = self._sizes.slots(result, self.rank)

    def _messages(
        self, name: str, work: Work, run: Generator[Any, Any, T], end: Callable[[T], None]
    ) -> Generator[Any, Any, T]:
        """The messages of a piece of work, which pass through here."""
        answers: Sequence[Received] | None = None
        try:
            while True:
                sent = answers
                messages = self._timed(work, lambda: next(run) if sent is None else run.send(sent))  # noqa: B023
                work.begin_message([tensor_of(each) for each in messages], self._width)
                self._working.append(work)
                try:
                    answers = self._answered(name, messages)
                    if answers is None:
                        answers = yield messages
                finally:
                    self._charge()
                    self._working.pop()
                work.end_message([each.tensor for each in answers], self._width)
        except StopIteration as stop:
            result: T = stop.value
        finally:
            run.close()
        end(result)
        return result

    def _answered(self, name: str, messages: Sequence[Message]) -> list[Received] | None:
        """Answers to messages that no other rank gets; ``None`` where these are to answer."""
        if self._answer is None:
            return None
        wire: RowWire = getattr(self._exchange, self._wires.get(name, "wire"))
        given = [self._answer(each, wire) for each in messages]
        if any(each is None for each in given):
            return None
        sent = np.sum([bytes_to_each(each, wire) for each in messages], axis=0).tolist()
        self._working[-1].send(self.rank, wire.channel.ranks.members, sent)
        return [Received(each) for each in given if each is not None]

    def _timed(self, work: Work, run: Callable[[], T]) -> T:
        self._charge()
        self._working.append(work)
        try:
            return run()
        finally:
            self._charge()
            self._working.pop()

    def _charge(self) -> None:
        """The time since the last call was spent on what is worked on."""
        now = time.perf_counter()
        if self._working:
            self._working[-1].spend(now - self._since)
        self._since = now

    def post(self, members: tuple[int, ...], going: Sequence[Tensor]) -> None:
        """See :class:`pibroch.sim.world.Account`."""
        if self._working:
            self._charge()
            self._working[-1].send(self.rank, members, [each.nbytes for each in going])

    def begin_to_wait(self) -> None:
        """See :class:`pibroch.sim.world.Account`."""
        self._charge()

    def end_to_wait(self) -> None:
        """See :class:`pibroch.sim.world.Account`."""
        self._since = time.perf_counter()


def looks_far(schedule: Schedule) -> bool:
    """Whether tasks wait for the last step that was read, far ahead."""
    return any(
        not isinstance(each, str) and each[1] == FAR_AHEAD
        for task in schedule.tasks
        for each in task.after
    )


def _watched_feed(feed: Iterator[JaggedBatch], embeddings: Embeddings) -> Iterator[JaggedBatch]:
    """A feed whose messages, where it sends some, are those of a task."""
    while True:
        yield watched("feed", embeddings.exchange, None, lambda: next(feed))


def _take_step(
    embeddings: Embeddings, batch: JaggedBatch, modules: PlacedModules | None, has_numbers: bool
) -> None:
    """A lookup, gradients, and the update that they lead to."""
    exchange = embeddings.exchange
    is_blocking = exchange.schedule is BLOCKING

    def look_up() -> list[Tensor]:
        return _tensors(embeddings(batch))

    given = watched("lookup", exchange, None, look_up) if is_blocking else look_up()
    if isinstance(exchange, TowersExchange) and modules is not None:
        widths = modules.widths
        outputs = torch.full((len(given[0]), widths[exchange.group]), GRADIENT)
        peers = exchange.last
        assert peers is not None, "looked up"
        exchange.to_peers(exchange.to_home(outputs, peers, widths), peers, widths)
    gradients = gradients_of(given) if has_numbers else list(map(torch.zeros_like, given))

    def update() -> None:
        torch.autograd.backward(given, gradients)

    if is_blocking:
        watched("update", exchange, None, update)
    else:
        update()


def gradients_of(given: Sequence[Tensor]) -> list[Tensor]:
    """Of some size and none alike, for embeddings: how far they are compressed depends on it."""
    drawn = torch.Generator().manual_seed(0)
    return [GRADIENT * torch.randn(each.shape, generator=drawn) for each in given]


def _tensors(given: Tensor | EmbeddingOutput) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    apart = [each.values for each in given.values() if not isinstance(each, Tensor)]
    are_pooled = any(isinstance(each, Tensor) for each in given.values())
    return [*apart, *([given.cat()] if are_pooled else ())]
