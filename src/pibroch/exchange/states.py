"""States of the tables of :class:`pibroch.Embeddings`: torch's state_dict, whole tables, DCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from pibroch.collectives import Channel, Ranks
from pibroch.embedding import PieceView, Shard, SparseOptimizer, Table, TableGroup
from pibroch.embedding.row_index import RowIndex
from pibroch.errors import ConfigError
from pibroch.exchange.base import Exchange, MovesRows
from pibroch.exchange.fused_optimizer import FusedOptimizer
from pibroch.exchange.raw_ids import RawIds
from pibroch.planner import Plan
from pibroch.state.dcp import EmbeddingState
from pibroch.state.state_dict import fill_tables, gather_tables, load_tables, whole_tables


class TableStates(nn.Module):
    """The base of :class:`pibroch.Embeddings`, which says what the attributes are."""

    tables: tuple[Table, ...]
    optimizers: dict[str, SparseOptimizer]
    groups: tuple[TableGroup, ...]
    exchange: Exchange[Any]
    fused_optimizer: FusedOptimizer
    step: int
    ranks: Ranks
    raw_ids: RawIds | None
    kind_in_state: ClassVar[str] = "embedding_bags"
    """What stands before a table's name in states, as in TorchRec's."""
    _is_left_out = False

    def pieces(self) -> list[PieceView]:
        """The parts of the tables that this process holds; waits for updates that are under way.

        Views stay valid, but after a step call this again before you look at them.
        """
        return [view for shard in self.shards() for view in shard.views()]

    def shards(self) -> Sequence[Shard]:
        """All rows that this process holds; waits for updates that are under way."""
        self.exchange.flush()
        return self.exchange.shards

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of tables.

        Setting it changes all groups' in proportion.
        """
        return self.fused_optimizer.learning_rates[0]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        usual = self.groups[0].optimizer.lr
        for each, shown in zip(self.groups, self.fused_optimizer.param_groups, strict=True):
            lr = each.optimizer.lr
            shown["lr"] = rate if lr == usual else lr * (rate / usual)

    def start_marks(self, name: str) -> None:
        """Mark the rows that are updated from now on, see :attr:`PieceView.marks`."""
        for shard in self.exchange.shards:
            shard.start_marks(name)

    @property
    def row_indices(self) -> dict[str, RowIndex]:
        """By table name, from its ids to its rows."""
        return {name: index for each in self.groups for name, index in each.space.indices.items()}

    @cached_property
    def control(self) -> Channel:
        """A channel between the ranks, for what happens beside steps.

        The first use opens it, at the same place on every rank.
        """
        return self.ranks.open_channel()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Within, ``state_dict`` and ``load_state_dict`` of an outer module omit the tables."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    @contextmanager
    def rewriting(self) -> Iterator[list[PieceView]]:
        """Within, :meth:`pieces` may be written to; all ranks call it.

        Nothing that was fetched before is used afterwards.
        """
        self.exchange.flush()
        self._forget_ahead()
        try:
            yield self.pieces()
        finally:
            self._forget_ahead()

    def _forget_ahead(self) -> None:
        self.exchange.forget()
        if self.raw_ids is not None:
            self.raw_ids.forget()

    def move_rows(self, plan: Plan, rows_per_step: int = 1024) -> None:
        """Move all rows to their homes under another plan while training goes on; returns at once.

        Each step sends some rows ahead. Once there are no more to send ahead, a step ends by
        sending the rest, and from then on the new plan is used. Until then checkpoints are of the
        old homes, and memory is taken twice. No number depends on it. All ranks call it at the
        same place. Every lookup that trains must be followed by its backward pass.

        Args:
            plan: for as many ranks.
            rows_per_step: rows of each group of tables that a rank sends ahead in a step at most.

        Raises:
            ConfigError: under ``local`` and ``towers``, where servers hold rows, for plans that cut
                rows (under ``lookahead`` also for copies), while rows are on their way already, and
                where samples are assigned by where rows are.
        """
        if rows_per_step < 1:
            raise ConfigError(f"rows_per_step {rows_per_step}", "at least 1")
        if self.exchange.rows_of is not None:
            raise ConfigError(
                "rows that are to move where samples are assigned by their homes: a run that is"
                " resumed would assign them otherwise",
                "homes that stay, or samples that stay as they are given",
                "leave `assign` out",
            )
        if not isinstance(self.exchange, MovesRows):
            raise ConfigError(
                f"rows that are to move under {type(self.exchange).__name__}",
                "the exchange alltoall, retrieve or lookahead",
            )
        self.exchange.move_to(plan, rows_per_step)

    @property
    def is_moving(self) -> bool:
        """Whether rows are on their way to another plan's homes, see :meth:`move_rows`."""
        return isinstance(self.exchange, MovesRows) and self.exchange.is_moving

    def full_state_dict(
        self,
        tables: Sequence[str] | None = None,
        *,
        on_all_ranks: bool = False,
        row_state: bool = False,
    ) -> dict[str, Tensor]:
        """Copies of whole tables, named as in ``state_dict``, on rank 0 or on all.

        All ranks call it; without ``on_all_ranks`` the others get an empty dictionary. Beside the
        copies it takes the memory of a few small buffers.

        Args:
            tables: by name, e.g. one at a time where memory is short; all when absent.
            on_all_ranks: whether all ranks get them, and not rank 0 alone.
            row_state: with the optimizers' state, named likewise.

        Raises:
            ConfigError: for a table that is not there, or whose row index has a state.
        """
        self._refuse_index_state()
        by_name = {table.name: table for table in self.tables}
        unknown = [name for name in tables or () if name not in by_name]
        if unknown:
            raise ConfigError(f"table {unknown[0]!r}", f"one of {', '.join(by_name)}")
        chosen = self.tables if tables is None else [by_name[name] for name in tables]
        return gather_tables(self, chosen, on_all_ranks=on_all_ranks, row_state=row_state)

    def load_full_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Fill all ranks' rows from what rank 0 passes, with optimizer state where it has some.

        All ranks call it.

        Args:
            state: whole tables on rank 0; what others pass is not looked at.
            strict: whether all tables must be there; else those that are absent stay as they are.

        Raises:
            CheckpointError: (on all ranks) for missing or other tables, or other shapes.
            ConfigError: for a table whose row index has a state.
        """
        self._refuse_index_state()
        fill_tables(self, state, strict)

    def stateful(self) -> EmbeddingState:
        """The tables as ``torch.distributed.checkpoint`` takes them.

        See :class:`~pibroch.state.dcp.EmbeddingState`.
        """
        return EmbeddingState(self)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """TorchRec's names; the tensors are views into the records, not copies.

        Raises:
            ConfigError: where this process does not hold whole tables.
        """
        if not self._is_left_out:
            self._refuse_index_state()
            self.exchange.flush()
            destination.update(
                whole_tables(self.tables, self.exchange.shards, f"{prefix}{self.kind_in_state}.")
            )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        metadata: object,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Copy weights in; optimizer state stays as it is (checkpoints carry it, see pibroch.save).

        Between ranks every rank calls it, with whole tables, and takes what it holds.
        """
        if self._is_left_out:
            return
        self._refuse_index_state()
        with self.rewriting() as views:
            problems = load_tables(self.tables, views, f"{prefix}{self.kind_in_state}.", state_dict)
        for collected, names in zip((missing, unexpected, errors), problems, strict=True):
            collected += names

    def _refuse_index_state(self) -> None:
        """Refuse tables whose row index has a state, without which no id leads to their rows."""
        for name, index in self.row_indices.items():
            if index.state():
                raise ConfigError(
                    f"table {name!r}, whose row index has a state, in a state_dict",
                    "tables whose rows follow from their ids",
                    "use pibroch.save and pibroch.load, or embeddings.stateful() with torch's DCP",
                )
