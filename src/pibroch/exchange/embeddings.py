"""The module that users hold: embeddings out, rows updated inside backward."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from numbers import Integral
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from pibroch.collectives import Channel, Ranks
from pibroch.config.exchange import find_exchange
from pibroch.data import JaggedBatch, Loader
from pibroch.embedding import (
    MemoryShard,
    Optimizers,
    RowSpace,
    Table,
    features_of,
    group_tables,
    optimizers_of,
)
from pibroch.embedding.row_index import RowChanges
from pibroch.errors import ConfigError, TrainingError
from pibroch.exchange.assigned import must_be_assigned, schedule_for
from pibroch.exchange.base import Exchange, ExchangeOptions, Rates, Setup
from pibroch.exchange.device_port import DevicePort, on_device
from pibroch.exchange.empty_batch import Filler, is_same
from pibroch.exchange.fingerprint import Fingerprint
from pibroch.exchange.finite import are_finite, not_finite
from pibroch.exchange.fused_optimizer import FusedOptimizer
from pibroch.exchange.learned_weights import by_id_where_learned
from pibroch.exchange.loss_scale import Scaler, report_finite, scaler_of_pass, unscaled
from pibroch.exchange.output import EmbeddingOutput, OutputForm
from pibroch.exchange.raw_ids import RawIds, learns
from pibroch.exchange.recomputation import KeptLookups, backward_pass, hidden, may_be_repeated
from pibroch.exchange.rows_of_batch import with_absent_ids, without_absent_ids
from pibroch.exchange.states import TableStates
from pibroch.kernels.arrays import Ints

logger = logging.getLogger(__name__)
B = TypeVar("B")
_not_compiled: Any = _disable_dynamo
"""``torch.compiler.disable`` at the first call: that one loads torch._dynamo, a second, at once."""
_NOT_COPIED = {"ranks", "control", "_handed_out", "_kept", "_scaler"}


class Embeddings(TableStates):
    """All embedding tables of a model.

    One call and its backward are one step: each row that the batch touches is updated exactly once,
    with the sum of its gradients in sample order. In ``eval()`` mode, under ``torch.no_grad()`` and
    while frozen (``requires_grad_(False)``, of this module or of one around it) nothing is updated.
    The tables are no torch parameters: a dense optimizer over ``parameters()`` leaves them alone.
    For what torch's own tools do with this module see ``docs/torch-tools.md``.

    Args:
        tables: of any dims; pooled or not.
        optimizer: the sparse optimizer, explicit always; or one by table name, ``""`` for tables
            that are not named.
        exchange: the strategy, with its options: ``pb.Local()`` (one process), ``pb.AllToAll()``,
            ``pb.Lookahead(cache_rows=...)``, ``pb.Retrieve()`` or ``pb.Towers()`` (all ranks of
            torch.distributed's group); or by name, which others have, too, see
            :func:`pibroch.config.exchange.exchanges`.
        seed: of the initial weights, which depend on nothing else but the tables' names; ``None``
            when all rows are to be written from outside.
        channel: between the ranks, for this module alone; over all ranks of torch.distributed's
            group when absent.
        device: where the dense model is: batches may come from there, and embeddings are given
            there. Rows stay in host memory. ``model.to(device)`` has the same effect.
        **options: of an exchange that is given by name.

    Example:
        >>> import torch, pibroch as pb
        >>> color = pb.Table("color", num_rows=3, dim=2)
        >>> embeddings = pb.Embeddings([color], optimizer=pb.SGD(lr=1.0))
        >>> ids = torch.tensor([[2, 0]])
        >>> batch = pb.JaggedBatch.from_one_hot(torch.zeros(2, 0), ["color"], ids, torch.zeros(2))
        >>> embeddings(batch).shape
        torch.Size([2, 1, 2])

    Attributes:
        optimizers: by table name.
        fused_optimizer: the rows' learning rates, for torch's schedulers.
        step: number of updates so far.
        transfers: vectors that were expected to cross between ranks for the batches of
            :meth:`feed` whose samples were assigned.
        transfers_given: likewise had they stayed as they were given.
        ranks: between which the tables lie.
        anchor: the only parameter, of no elements: rows are frozen while it requires no gradient.
            Not in ``state_dict``.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizers,
        exchange: str | ExchangeOptions = "local",
        seed: int | None = 0,
        channel: Channel | None = None,
        device: torch.device | str | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        name, options = _chosen(exchange, options)
        spec = find_exchange(name)
        self.tables = tuple(tables)
        self.optimizers = optimizers_of(tables, optimizer)
        self.groups = group_tables(tables, optimizer)
        self.features = features_of(tables)
        setup = Setup(self.groups, None if seed is None else operator.index(seed), channel)
        self.exchange: Exchange[Any] = spec.build(setup, **options)
        self.ranks = setup.ranks
        self.raw_ids: RawIds | None = None
        if learns(self.groups):
            if not self.exchange.takes_raw_ids:
                raise ConfigError(
                    f"tables of raw ids under {name}",
                    "the exchange local, alltoall, retrieve or lookahead",
                )
            used = setup.__dict__.get("channel", Ranks.alone().open_channel())
            self.raw_ids = RawIds(self.groups, used, setup.seed)
        self.fused_optimizer = FusedOptimizer(self.groups)
        self._overflow = FusedOptimizer(self.groups)  # shown to a scaler where gradients overflow
        self.step = 0
        self.transfers = 0
        self.transfers_given = 0
        self._output = OutputForm(self.tables, self.groups)
        self._port = None if device is None else DevicePort(device)
        self._averaged = False
        self._absent: set[str] = set()
        self._warned_of_waiting = False
        self._warned_of_two = False
        self._begin()
        # Makes autograd call the update; whether, where and in which type embeddings are given
        # follows from it. A parameter, since all that torch does to a model it does to these.
        self.anchor = nn.Parameter(torch.empty(0, device=device))

    def _begin(self) -> None:
        """Make what a copy has anew: the state of steps under way."""
        # by feed: the user's ids, the prepared batch, checksums of when it was read
        self._handed_out: deque[tuple[Any, JaggedBatch, Fingerprint | None]] = deque(maxlen=4)
        self._kept = KeptLookups()
        self._scaler: Scaler | None = None

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

    def load_weights(
        self, table: str, source: object, *, tensor: str | None = None, ids: object = None
    ) -> None:
        """Give a table weights from outside, see :func:`pibroch.embedding.pretrained.load_weights`.

        Between ranks every rank calls it, with the same source; each takes what it holds.

        Raises:
            ConfigError: when there is no such table.
            DataError: for a source that cannot be read, or does not fit the table.
        """
        by_name = {each.name: each for each in self.tables}
        if table not in by_name:
            raise ConfigError(
                f"weights for table {table!r}", f"one of the tables {sorted(by_name)}"
            )
        # loads a library for data frames, which few programs need
        from pibroch.embedding.pretrained import load_weights

        with self.rewriting() as views:
            index = self.row_indices[table]
            load_weights(
                views,
                by_name[table],
                index,
                self.optimizers[table],
                source,
                tensor=tensor,
                ids=ids,
                step=self.step,
            )

    def watch_ids(self, callback: Callable[[int, Mapping[str, RowChanges]], None]) -> None:
        """Be told which ids of tables of raw ids are given rows, and which lose theirs.

        ``callback(step, changes)`` is called when a step begins, inside its lookup and on its
        thread, on each rank with the same changes: ``step`` counts from 1, as :attr:`step` after
        the update, and ``changes`` has what changed in each table. A second lookup before the
        update, or one after a skipped update, comes with the same number. An error that it raises
        comes out of the lookup, and the rows are not to be trained on after it. Copies of this
        module tell nobody.

        Args:
            callback: called; it must not write to the arrays.

        Raises:
            ConfigError: when no table has raw ids.
        """
        if self.raw_ids is None:
            raise ConfigError(
                "watch_ids() without a table of raw ids",
                "a table with rows that ids lose",
                "give one rows=pb.Hashed(...)",
            )
        self.raw_ids.watchers.append(lambda changes: callback(self.step + 1, changes))

    @property
    def shard(self) -> MemoryShard:
        """The row records of this process, where one shard has them all, not cut by columns.

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
        """Iterate over ``batches`` as the exchange wants it.

        Strategies read ahead, so that ids and rows travel early.

        Batches may be any objects: what is looked up is ``key(batch)``, and the loop gets its own
        batches back. It calls the module with what ``key`` gave, or with ids over the same tensors;
        others are looked up late, with one warning. Batches that are read ahead are not copied: a
        loader that fills the same tensors again is refused.

        Between ranks, one that runs out of batches before the others goes on with empty ones until
        all have run out: each a :class:`JaggedBatch` of no samples, or with a ``key`` a copy of the
        rank's last batch without its samples. Of several modules one reads ahead, and the others
        are called with its batches.

        Args:
            batches: to come.
            key: gives of a batch the ids, a :class:`JaggedBatch` or anything with TorchRec's
                ``keys()``, ``values()``, ``lengths()``; the batch itself when absent.
            empty: makes of a batch one without samples;
                :func:`pibroch.exchange.empty_batch.without_samples` when absent.

        Raises:
            DataError: for a batch whose tensors were written to since it was read ahead, here or
                when it is looked up.
            ConfigError: for the feed of another module, where both would read ahead; for a batch of
                which no empty one can be made, and where a rank with a ``key`` has no batch at all;
                where samples are assigned by their rows, for batches of no :class:`Loader`.
        """
        if (
            self.exchange.reads_ahead
            and getattr(batches, "gi_code", None) is Embeddings.feed.__code__
        ):
            raise ConfigError(
                "a feed of another module's feed",
                "one module that reads ahead",
                "feed the one with the most bytes, and call the others with its batches",
            )
        trains = self.training and torch.is_grad_enabled() and self._switch.requires_grad
        are_assigned = trains and self.exchange.rows_of is not None
        if are_assigned and isinstance(batches, Loader):
            self.assign(batches)
        read: deque[tuple[B, Any, Fingerprint | None]] = deque()
        is_ahead = type(self.exchange).feed is not Exchange.feed

        def prepared() -> Iterator[JaggedBatch]:
            for batch in batches:
                ids = batch if key is None else key(batch)
                prepared_batch = self._prepare(ids)
                if are_assigned:
                    must_be_assigned(prepared_batch)
                read.append((batch, ids, Fingerprint(batch, ids) if is_ahead else None))
                yield prepared_batch

        filler: Filler[B] = Filler(key, empty)
        raw_ids = self.raw_ids if trains and is_ahead else None
        of_ids = prepared()
        of_rows = of_ids if raw_ids is None else raw_ids.feed(of_ids, self.features)
        for batch_of_rows in self.exchange.feed(of_rows, trains):
            prepared_batch = batch_of_rows if raw_ids is None else raw_ids.given(batch_of_rows)
            if read:
                batch, ids, fingerprint = read.popleft()
                filler.follow(batch, prepared_batch)
            else:
                (batch, ids) = filler.make(prepared_batch)
                fingerprint = None
            if fingerprint is not None:
                fingerprint.check_others()
            if prepared_batch.assigned is not None:
                self.transfers += prepared_batch.assigned.transfers
                self.transfers_given += prepared_batch.assigned.transfers_given
            self._handed_out.append((ids, prepared_batch, fingerprint))
            yield batch

    def assign(self, loader: Loader) -> Loader:
        """Have a loader give each rank the samples whose rows it has, where the exchange wants it.

        :meth:`feed` does it to a loader. Who feeds what is made of one, such as several epochs in
        one stream, calls this first. Every rank does, with a loader of its ``part`` of the same
        data. Each rank has as many samples as before, in the order of the global batch.

        Which samples these are depends on the data, the loader's settings, the position, the number
        of ranks and where rows are at home, alone.

        Args:
            loader: is changed where the exchange has ``assign="rows"``, unless it was already.

        Returns:
            The loader.

        Raises:
            ConfigError: on every rank, when their loaders read different data.
        """
        rows = self.exchange.rows_of
        if rows is not None and loader.assignment is None:
            loader.assignment = schedule_for(loader, rows, self.control)
        return loader

    @_not_compiled
    def forward(self, batch: object) -> Tensor | EmbeddingOutput:
        """Pooled embeddings of tables of one dim, float32 ``[B, F, D]``; F as the tables' features.

        Of tables of several dims, or where some are not pooled, an
        :class:`~pibroch.exchange.output.EmbeddingOutput`: it has each feature's by its name. A
        feature absent from a batch counts as empty bags, with one logged warning. Between ranks
        every rank must call, in the same order; a batch may be empty. Weights of ids that require a
        gradient get it.

        Args:
            batch: a :class:`JaggedBatch`, or anything with TorchRec's ``keys()``, ``values()``,
                ``lengths()``.

        Raises:
            RowIdError: for an id outside its table; names the feature, the sample and the id.
            DataError: for a batch without any of the features, or a bad batch on another rank.
            TrainingError: inside transforms of torch.func; in a backward pass that trains these
                tables, but for lookups that checkpointing without reentry makes again.
        """
        if torch._C._are_functorch_transforms_active():
            raise TrainingError(
                "a lookup inside a transform of torch.func, such as grad or vmap",
                "lookups outside, whose gradients backward() brings",
                "look up before the transform and give it the embeddings",
            )
        prepared, is_fed = self._as_prepared(batch)
        trains = self.training and self._switch.requires_grad
        in_pass = backward_pass()
        if trains and torch.is_grad_enabled():
            if in_pass is not None:
                return self._output.of(prepared, self._kept.find(prepared))
            if not is_fed:
                self._warn_of_waiting()
            return self._output.of(prepared, _Lookup.apply(self._switch, self, prepared))
        if trains and in_pass is not None and in_pass == self._kept.updated_in:
            raise TrainingError(
                "a lookup inside a backward pass that has updated rows of these tables",
                "lookups before backward(), or after it",
                "look up outside the block or hook that runs inside backward()",
            )
        return self.given(prepared, self._read(prepared))

    def has_rows(self, feature: str, ids: Ints) -> NDArray[np.bool_]:
        """Which ids of a feature, int64 ``[V]``, have a row of their own; of raw ids not all do."""
        if self.raw_ids is None or feature not in self.raw_ids.features:
            return np.ones(len(ids), np.bool_)
        return self.raw_ids.has_rows(feature, ids)

    def scaled_by(self, scaler: Scaler | None) -> Self:
        """Set the scaler by which losses are multiplied, if it is not torch's.

        A ``torch.amp.GradScaler`` is noticed without this. Gradients are divided by
        ``scaler.get_scale()``. Where some are not finite on any rank, no rank updates rows, and
        ``scaler.unscale_`` is shown it. Copies of this module have no scaler.

        Args:
            scaler: of all losses from now on; ``None`` for none. Between ranks every rank calls it.
        """
        self._scaler = scaler
        return self

    @property
    def averaged_at(self) -> int | None:
        """The step as of which lookups give moving averages, inside :meth:`averaged`.

        ``None`` where they give weights.
        """
        return self.step if self._averaged else None

    def prepared(self, batch: object) -> JaggedBatch:
        """The batch in the form that exchanges take; see :meth:`given`.

        Raises:
            DataError: for one without any of the features.
        """
        return self._prepare(batch)

    def given(self, batch: JaggedBatch, embeddings: Sequence[Tensor]) -> Tensor | EmbeddingOutput:
        """The result of a call for a prepared batch, from the embeddings of each group.

        See :meth:`prepared`.
        """
        return self._output.of(batch, on_device(self._port, self._output.joined(batch, embeddings)))

    @property
    def _switch(self) -> Tensor:
        """``anchor``, in a tenth of an attribute's time while it is this module's parameter."""
        parameter = self._parameters.get("anchor")
        return self.anchor if parameter is None else parameter

    def _as_prepared(self, batch: object) -> tuple[JaggedBatch, bool]:
        """The prepared batch, and whether :meth:`feed` handed it out."""
        fed = next((each for each in reversed(self._handed_out) if is_same(each[0], batch)), None)
        if fed is None:
            return self._prepare(batch), False
        _, prepared, fingerprint = fed
        if fingerprint is not None:
            fingerprint.check_ids()
        return prepared, True

    def _prepare(self, batch: object) -> JaggedBatch:
        """The batch in the form that exchanges take: this module's features in their order."""
        batch = batch if self._port is None else self._port.batch_to_host(batch)
        prepared = batch if isinstance(batch, JaggedBatch) else JaggedBatch.from_keyed_jagged(batch)
        keys = prepared.keys
        absent: tuple[str, ...] = ()
        if keys != self.features:
            present = frozenset(keys)
            absent = tuple(feature for feature in self.features if feature not in present)
        # perhaps of another module's feed, with the features of that one
        is_filler = prepared.batch_size == 0
        if absent and (is_filler or len(absent) < len(self.features)):
            if not is_filler:
                self._warn_of(absent)
            prepared = prepared.with_empty(absent)
        return by_id_where_learned(prepared.select(self.features))

    def _warn_of(self, absent: tuple[str, ...]) -> None:
        new = sorted(set(absent) - self._absent)
        if new:
            logger.warning(
                "features absent from a batch count as empty bags, from now on silently: %s",
                ", ".join(new),
            )
            self._absent |= set(new)

    def _note_update_in(self, backward: int | None) -> None:
        if backward is not None and backward == self._kept.updated_in and not self._warned_of_two:
            logger.warning(
                "one backward pass through two lookups: each is a step of the rows' optimizer, and"
                " rows of both are updated twice; for one update look up one batch with the samples"
                " of both"
            )
            self._warned_of_two = True
        self._kept.updated_in = backward

    def _warn_of_waiting(self) -> None:
        if self.exchange.reads_ahead and not self._warned_of_waiting:
            logger.warning(
                "a batch that did not come through embeddings.feed(...): its ids and rows travel"
                " while the model waits"
            )
            self._warned_of_waiting = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, lookups without gradients give moving averages of rows where these are kept.

        They are kept where the optimizer has an ``average``.

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

    def _read(self, batch: JaggedBatch) -> list[Tensor]:
        """The embeddings of each group, of a lookup that no update follows."""
        if self.raw_ids is None:
            return self.exchange.lookup(batch, False, self.averaged_at)[0]
        as_rows = self.raw_ids.read(batch)
        embeddings, _ = self.exchange.lookup(as_rows.rows, False, self.averaged_at)
        return with_absent_ids(self.groups, as_rows, embeddings)

    def _look_up(self, batch: JaggedBatch) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors of a lookup that an update is to follow, and its handle."""
        if self.raw_ids is None:
            embeddings, handle = self.exchange.lookup(batch, True)
        else:
            as_rows = self.raw_ids.begin(batch)
            embeddings, handle = self.exchange.lookup(as_rows.rows, True)
            embeddings = with_absent_ids(self.groups, as_rows, embeddings)
            handle = as_rows, handle
        return on_device(self._port, self._output.joined(batch, embeddings)), handle

    def _update(self, handle: Any, batch: JaggedBatch, given: Sequence[Tensor]) -> None:
        """Update the rows of a lookup by the gradients of its tensors; inside a backward pass."""
        gradients = given
        if torch.is_grad_enabled():  # create_graph=True records this
            gradients = [gradient.detach() for gradient in given]
        scaler = self._scaler or scaler_of_pass()
        updates = self._switch.requires_grad
        if scaler is not None:
            gradients, is_finite = unscaled(gradients, scaler)
            if self.ranks.world_size > 1:
                is_finite = all(self.control.gather(is_finite))
            report_finite(scaler, is_finite, self.fused_optimizer, self._overflow)
            updates &= is_finite
        error = None
        if updates and scaler is None and not are_finite(gradients):
            with torch.no_grad():
                by_feature = self._output.by_feature(batch, gradients)
            error = not_finite(by_feature, self.step + 1)
            if self.ranks.world_size > 1:
                raise error  # the others miss this rank's gradients, and end in the same step
            updates = False
        if not updates:
            gradients = [torch.zeros_like(gradient) for gradient in gradients]
        of_groups = self._output.gradients(batch, gradients)
        if self.raw_ids is not None:
            as_rows, handle = handle
            self.raw_ids.end()
            of_groups = without_absent_ids(self.groups, as_rows, of_groups)
        if updates:
            self.step += 1
            self._note_update_in(backward_pass())
            rates = Rates(self.fused_optimizer.learning_rates, self.step)
            self.exchange.update(handle, of_groups, rates)
        else:
            self.exchange.drop(handle, of_groups)
        if error is not None:
            self.exchange.fetch_next()  # a backward pass that fails makes no callbacks
            raise error

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, ``torch.save`` and ``copy.deepcopy``.

        It holds rows, their optimizers' state and the step.

        Raises:
            ConfigError: where other processes take part in what this module does.
        """
        if not self.exchange.can_be_copied:
            raise ConfigError(
                f"a copy, or a pickle, of tables under {type(self.exchange).__name__}, which hold"
                " on to other processes or threads",
                "tables of the exchange local",
                "keep them by pibroch.save or full_state_dict(), copy the dense model alone",
            )
        self.exchange.flush()
        return {name: part for name, part in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.ranks = Ranks.alone()
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        logger.warning(
            "a deep copy of embedding tables, whose rows go their own way from now on: torch's"
            " AveragedModel, and whatever else averages parameters, leaves them as they are at the"
            " copy; for moving averages of rows give their optimizer average=, and look up inside"
            " embeddings.averaged()"
        )
        copied: Self = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(self.__getstate__(), memo))
        return copied

    def _replicate_for_data_parallel(self) -> Self:
        raise ConfigError(
            "embedding tables inside torch.nn.DataParallel, whose threads would update them at the"
            " same time",
            "one process for each device",
            "use pibroch.data_parallel, see docs/distributed.md",
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by ``to``, ``half``, ``cuda`` and the like.

        Embeddings are given on that device and in that type from now on. Rows stay in host memory,
        of their tables' types. The device ``meta``, which holds nothing, changes nothing.

        Raises:
            ConfigError: for ``share_memory()``.
        """
        moved = fn(torch.empty(0))
        if moved.device.type == "cpu" and moved.is_shared():
            raise ConfigError(
                "share_memory() of embedding tables, whose rows each process would have for itself",
                "one process for each rank",
                'train by exchange="alltoall" with torch.distributed, see docs/distributed.md',
            )
        self._output.dtype = moved.dtype
        if moved.device.type not in ("cpu", "meta"):
            self._port = DevicePort(moved.device)
        elif self._port is not None and self._port.device.type != moved.device.type != "meta":
            self._port = None
        super()._apply(fn, recurse)
        return self


class _Lookup(torch.autograd.Function):
    """Forward looks rows up; backward updates them.

    Autograd calls backward on the thread that called ``backward()``, or on one of its own where the
    dense model is on another device: the exchange takes both for the training thread, as the caller
    waits meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embeddings: Embeddings, batch: JaggedBatch
    ) -> tuple[Tensor, ...]:
        ctx.embeddings = embeddings
        ctx.batch = batch
        ctx.kept = None
        if not may_be_repeated():
            given, ctx.handle = embeddings._look_up(batch)
            return given
        with hidden():
            given, ctx.handle = embeddings._look_up(batch)
            ctx.kept = embeddings._kept.keep(batch, given)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        embeddings: Embeddings = ctx.embeddings
        if ctx.handle is None:
            raise TrainingError(
                "a second backward through one embeddings(batch)",
                "one backward a call: each updates the rows",
                "sum the losses and call backward once",
            )
        here = gradients if embeddings._port is None else embeddings._port.to_host(gradients)
        handle = ctx.handle
        ctx.handle = None
        embeddings._update(handle, ctx.batch, here)
        if ctx.kept is not None:
            Variable._execution_engine.queue_callback(partial(setattr, ctx, "kept", None))
        Variable._execution_engine.queue_callback(embeddings.exchange.fetch_next)
        return None, None, None


def _chosen(
    exchange: str | ExchangeOptions, options: dict[str, object]
) -> tuple[str, dict[str, object]]:
    """The exchange's name and its options; whole numbers are Python's, not NumPy's."""
    name = exchange if isinstance(exchange, str) else exchange.exchange
    if not isinstance(exchange, str):
        if options:
            raise ConfigError(
                f"options {sorted(options)} beside {type(exchange).__name__}(...)",
                "all options of an exchange in one place",
                f"write them into {type(exchange).__name__}(...)",
            )
        options = exchange.given()
    return name, {
        key: int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
        for key, value in options.items()
    }
