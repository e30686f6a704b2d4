"""The module that users hold: embeddings out, rows updated inside backward."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from pibroch.collectives import Channel
from pibroch.config.exchange import find_exchange
from pibroch.data import JaggedBatch
from pibroch.embedding import (
    MemoryShard,
    Optimizers,
    RowSpace,
    Table,
    group_tables,
    optimizers_of,
)
from pibroch.errors import ConfigError, TrainingError
from pibroch.exchange.base import Exchange, Rates, Setup
from pibroch.exchange.device_port import DevicePort, there
from pibroch.exchange.empty_batch import Filler, is_same
from pibroch.exchange.fingerprint import Fingerprint
from pibroch.exchange.fused_optimizer import FusedOptimizer
from pibroch.exchange.learned_weights import by_id_where_learned
from pibroch.exchange.output import EmbeddingOutput, OutputForm
from pibroch.exchange.states import TableStates

logger = logging.getLogger(__name__)
B = TypeVar("B")


class Embeddings(TableStates):
    """All embedding tables of a model.

    One call and its backward are one step: each row that the batch touches is updated exactly once, with the sum of its
    gradients in sample order. In ``eval()`` mode and under ``torch.no_grad()`` nothing is updated. The tables are no
    torch parameters: a dense optimizer over ``parameters()`` leaves them alone.

    Args:
        tables: of any dims; pooled or not.
        optimizer: the sparse optimizer, explicit always; or one by table name, ``""`` for tables that are not named.
        exchange: strategy by name: ``"local"`` (one process), ``"alltoall"``, ``"lookahead"`` (all ranks of
            torch.distributed's group), or another that :func:`pibroch.config.exchange.exchanges` lists.
        seed: of the initial weights, which depend on nothing else but the tables' names; ``None`` to leave them to who writes
            all rows.
        channel: between the ranks, for this module alone; over all ranks of torch.distributed's group when absent.
        device: where the dense model is: batches may come from there, and embeddings are given there. Rows stay in host memory.
        **options: of the exchange, see :class:`pibroch.exchange.alltoall.build.PlacedOptions` and
            :class:`pibroch.exchange.lookahead.build.LookaheadOptions`.

    Example:
        >>> import torch, pibroch as pb
        >>> embeddings = pb.Embeddings([pb.Table("color", num_rows=3, dim=2)], optimizer=pb.SGD(lr=1.0))
        >>> ids = torch.tensor([[2, 0]])
        >>> batch = pb.JaggedBatch.from_one_hot(torch.zeros(2, 0), ["color"], ids, torch.zeros(2))
        >>> embeddings(batch).shape
        torch.Size([2, 1, 2])

    Attributes:
        optimizers: by table name.
        fused_optimizer: the rows' learning rates, for torch's schedulers.
        step: number of updates so far.
        ranks: between which the tables lie.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizers,
        exchange: str = "local",
        seed: int | None = 0,
        channel: Channel | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        spec = find_exchange(exchange)
        self.tables = tuple(tables)
        self.optimizers = optimizers_of(tables, optimizer)
        self.groups = group_tables(tables, optimizer)
        self.features = tuple(
            dict.fromkeys(feature for table in tables for feature in table.features)
        )
        setup = Setup(self.groups, None if seed is None else operator.index(seed), channel)
        plain = {
            name: int(value)
            if isinstance(value, Integral) and not isinstance(value, bool)
            else value
            for name, value in options.items()
        }
        self.exchange: Exchange[Any] = spec.build(setup, **plain)
        self.ranks = setup.ranks
        self.fused_optimizer = FusedOptimizer(self.groups)
        self.step = 0
        self._output = OutputForm(self.tables, self.groups)
        self._port = None if device is None else DevicePort(device)
        self._averaged = self._is_frozen = False
        self._absent: set[str] = set()
        self._handed_out: deque[tuple[Any, JaggedBatch, Fingerprint | None]] = deque(
            maxlen=4
        )  # by feed: what is asked for, as it is known, and what it held when it was read
        self._warned_of_waiting = False
        self._anchor = torch.zeros(
            (), requires_grad=True
        )  # makes autograd call the update; never a parameter

    @property
    def row_space(self) -> RowSpace:
        """The addresses of all rows, where all tables are of one group.

        Raises:
            ConfigError: when they have several row spaces.
        """
        if len(self.groups) > 1:
            raise ConfigError(
                f"the row space of {len(self.groups)} groups of tables",
                "one group",
                "look at groups",
            )
        return self.groups[0].space

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of tables; setting it changes all groups' in proportion."""
        return self.fused_optimizer.learning_rates[0]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        usual = self.groups[0].optimizer.lr
        for each, known in zip(self.groups, self.fused_optimizer.param_groups, strict=True):
            lr = each.optimizer.lr
            known["lr"] = rate if lr == usual else lr * (rate / usual)

    def track_touched(self) -> None:
        """Mark the rows that are updated from now on, see :attr:`PieceView.touched`."""
        for shard in self.exchange.shards:
            shard.track_touched()

    def load_weights(
        self, table: str, source: object, *, tensor: str | None = None, ids: object = None
    ) -> None:
        """Give a table weights from outside, see :func:`pibroch.embedding.pretrained.load_weights`.

        Between ranks every rank calls it, with the same source; each takes what it holds.

        Raises:
            ConfigError: when there is no such table.
            DataError: for a source that cannot be read, or does not fit the table.
        """
        known = {each.name: each for each in self.tables}
        if table not in known:
            raise ConfigError(f"weights for table {table!r}", f"one of the tables {sorted(known)}")
        from pibroch.embedding.pretrained import (
            load_weights,
        )  # with a library for tables, which few programs need

        with self.rewriting() as views:
            load_weights(views, known[table], source, tensor=tensor, ids=ids, step=self.step)

    @property
    def shard(self) -> MemoryShard:
        """The row records that this process holds, where one shard holds them all (every placement but column-wise).

        Raises:
            ConfigError: when there are several, or they lie on servers.
        """
        self.exchange.flush()
        if len(self.exchange.shards) != 1 or not isinstance(self.exchange.shards[0], MemoryShard):
            raise ConfigError(
                f"{len(self.exchange.shards)} shards, or one on a server",
                "one shard in this process",
                "use pieces()",
            )
        return self.exchange.shards[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all row records that this process holds: weights and optimizer state."""
        return sum(shard.num_bytes for shard in self.exchange.shards)

    def feed(
        self,
        batches: Iterable[B],
        key: Callable[[B], Any] | None = None,
        empty: Callable[[B], B] | None = None,
    ) -> Iterator[B]:
        """Iterate over ``batches`` as the exchange wants it: strategies read ahead, so that ids and rows travel early.

        Batches may be any objects: what is looked up is ``key(batch)``, and the loop gets its own batches back. It calls the
        module with what ``key`` gave, or with ids over the same tensors; others are looked up late, with one warning.
        Batches that are read ahead are not copied: a loader that fills the same tensors again is
        refused.

        Between ranks, one that runs out of batches before the others goes on with empty ones until all have run out: each a
        :class:`JaggedBatch` of no samples, or with a ``key`` a copy of the rank's last batch without its samples. Of several
        modules one reads ahead, and the others are called with its batches.

        Args:
            batches: to come.
            key: gives of a batch the ids, a :class:`JaggedBatch` or anything with TorchRec's ``keys()``, ``values()``,
                ``lengths()``; the batch itself when absent.
            empty: makes of a batch one without samples; :func:`pibroch.exchange.empty_batch.without_samples` when absent.

        Raises:
            DataError: for a batch whose tensors were written to since it was read ahead, here or
                when it is looked up.
            ConfigError: for the feed of another module, where both would read ahead; for a batch of which no empty one can be
                made, and where a rank with a ``key`` has no batch at all.
        """
        if (
            self.exchange.reads_ahead
            and getattr(batches, "gi_code", None) is Embeddings.feed.__code__
        ):
            raise ConfigError(
                "a feed of another module's feed", "one module that reads ahead",
                "feed the one with the most bytes, and call the others with its batches",
            )  # fmt: skip
        read: deque[tuple[B, Any, Fingerprint | None]] = deque()
        is_ahead = type(self.exchange).feed is not Exchange.feed

        def prepared() -> Iterator[JaggedBatch]:
            for batch in batches:
                asked = batch if key is None else key(batch)
                known = self._prepare(asked)
                read.append((batch, asked, Fingerprint(batch, asked) if is_ahead else None))
                yield known

        filler: Filler[B] = Filler(key, empty)
        for known in self.exchange.feed(
            prepared(), self.training and torch.is_grad_enabled() and not self._is_frozen
        ):
            if read:
                batch, asked, fingerprint = read.popleft()
                filler.follow(batch, known)
            else:
                (batch, asked), fingerprint = filler.make(known), None
            if fingerprint is not None:
                fingerprint.check_others()
            self._handed_out.append((asked, known, fingerprint))
            yield batch

    def forward(self, batch: object) -> Tensor | EmbeddingOutput:
        """Pooled embeddings of tables of one dim, float32 ``[B, F, D]``, F in the order of the tables' features.

        Of tables of several dims, or where some are not pooled, an :class:`~pibroch.exchange.output.EmbeddingOutput`: it has
        each feature's by its name. A feature absent from a batch counts as empty bags, with one logged warning. Between ranks
        every rank must call, in the same order; a batch may be empty. Weights of ids that require a gradient get it.

        Args:
            batch: a :class:`JaggedBatch`, or anything with TorchRec's ``keys()``, ``values()``, ``lengths()``.

        Raises:
            RowIdError: for an id outside its table; names the feature, the sample and the id.
            DataError: for a batch without any of the features, or a bad batch on another rank.
        """
        known, is_fed = self._known(batch)
        if torch.is_grad_enabled() and self.training and not self._is_frozen:
            if not is_fed:
                self._warn_of_waiting()
            return self._output.of(known, _Lookup.apply(self._anchor, self, known))
        found, _ = self.exchange.lookup(known, False, self.averaged_at)
        return self.given(known, found)

    @property
    def averaged_at(self) -> int | None:
        """The step as of which lookups give moving averages, inside :meth:`averaged`; ``None`` where they give weights."""
        return self.step if self._averaged else None

    def prepared(self, batch: object) -> JaggedBatch:
        """The batch as exchanges know it; see :meth:`given`.

        Raises:
            DataError: for one without any of the features.
        """
        return self._prepare(batch)

    def given(self, known: JaggedBatch, found: Sequence[Tensor]) -> Tensor | EmbeddingOutput:
        """What a call gives for a batch, once an exchange has found the embeddings of each group; see :meth:`prepared`."""
        return self._output.of(known, there(self._port, self._output.joined(known, found)))

    def _known(self, batch: object) -> tuple[JaggedBatch, bool]:
        """The batch as the exchange knows it, and whether it came through :meth:`feed`."""
        fed = next((each for each in reversed(self._handed_out) if is_same(each[0], batch)), None)
        if fed is None:
            return self._prepare(batch), False
        _, known, fingerprint = fed
        if fingerprint is not None:
            fingerprint.check_ids()
        return known, True

    def _prepare(self, batch: object) -> JaggedBatch:
        """The batch as exchanges know it: this module's features in their order."""
        batch = batch if self._port is None else self._port.batch_to_host(batch)
        known = batch if isinstance(batch, JaggedBatch) else JaggedBatch.from_keyed_jagged(batch)
        absent = tuple(feature for feature in self.features if feature not in known.keys)
        is_filler = (
            known.batch_size == 0
        )  # perhaps of another module's feed, which knows its own features
        if absent and (is_filler or len(absent) < len(self.features)):
            if not is_filler:
                self._warn_of(absent)
            known = known.with_empty(absent)
        return by_id_where_learned(known.select(self.features))

    def _warn_of(self, absent: tuple[str, ...]) -> None:
        new = sorted(set(absent) - self._absent)
        if new:
            logger.warning(
                "features absent from a batch count as empty bags, from now on silently: %s",
                ", ".join(new),
            )
            self._absent |= set(new)

    def _warn_of_waiting(self) -> None:
        if self.exchange.reads_ahead and not self._warned_of_waiting:
            logger.warning(
                "a batch that did not come through embeddings.feed(...): its ids and rows travel while the model waits"
            )
            self._warned_of_waiting = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, lookups without gradients give the rows' moving averages (the optimizer's ``average``) where some are kept.

        Raises:
            ConfigError: when the optimizer keeps none.
        """
        if all(each.optimizer.average is None for each in self.groups):
            raise ConfigError(
                "averaged() with an optimizer that keeps no average",
                "e.g. Adagrad(..., average=0.999)",
            )
        self._averaged = True
        try:
            yield
        finally:
            self._averaged = False

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the tables, or thaw them: frozen rows are looked up and not updated. Takes effect from the next feed on.

        Between ranks every rank calls it at the same place. A module around this one knows parameters alone: freeze this one.
        """
        self._is_frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``half``, ``cuda`` and their like do: rows are in host memory, of their tables' types, and stay so.

        Raises:
            ConfigError: for another type, or a device that is not the one given.
        """
        wanted, there = fn(torch.zeros(())), "cpu" if self._port is None else self._port.device.type
        if wanted.dtype != torch.float32 or wanted.device.type not in ("cpu", there):
            raise ConfigError(
                f"embedding tables to be {wanted.dtype} on {wanted.device}", "float32 on the CPU",
                "move the dense model alone, and make this one with device=, where embeddings then are",
            )  # fmt: skip
        return self


class _Lookup(torch.autograd.Function):
    """Forward looks rows up; backward updates them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embeddings: Embeddings, batch: JaggedBatch
    ) -> tuple[Tensor, ...]:
        found, handle = embeddings.exchange.lookup(batch, True)
        ctx.embeddings, ctx.handle, ctx.batch = embeddings, handle, batch
        return there(embeddings._port, embeddings._output.joined(batch, found))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        embeddings: Embeddings = ctx.embeddings
        if ctx.handle is None:
            raise TrainingError(
                "a second backward through one embeddings(batch)", "one backward a call: each updates the rows",
                "sum the losses and call backward once",
            )  # fmt: skip
        embeddings.step += 1
        rates = Rates(embeddings.fused_optimizer.learning_rates, embeddings.step)
        here = gradients if embeddings._port is None else embeddings._port.to_host(gradients)
        embeddings.exchange.update(ctx.handle, embeddings._output.gradients(ctx.batch, here), rates)
        ctx.handle = None
        Variable._execution_engine.queue_callback(embeddings.exchange.fetch_next)
        return None, None, None
