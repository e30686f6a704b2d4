"""What this room asks of those whose state it keeps: tables between ranks, and a training session.

Protocols, so that nothing of exchanges or of training is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pibroch.collectives import Channel, Ranks
from pibroch.config import RunConfig
from pibroch.data import EncodedDataset
from pibroch.embedding import PieceView, Shard, SparseOptimizer, Table
from pibroch.embedding.row_index import RowIndex


class TablesOfRanks(Protocol):
    """A module of tables, as far as states of them need it: :class:`pibroch.Embeddings`.

    Attributes:
        step: number of updates so far.
        learning_rate: of the rows of the first group of tables.
    """

    step: int
    learning_rate: float

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables."""

    @property
    def optimizers(self) -> dict[str, SparseOptimizer]:
        """By table name."""

    @property
    def fused_optimizer(self) -> torch.optim.Optimizer:
        """The rows' learning rates."""

    @property
    def ranks(self) -> Ranks:
        """Between which the tables lie."""

    @property
    def control(self) -> Channel:
        """A channel between these, for what happens beside steps."""

    @property
    def kind_in_state(self) -> str:
        """What stands before a table's name."""

    @property
    def row_indices(self) -> dict[str, RowIndex]:
        """By table name, from its ids to its rows."""

    def shards(self) -> Sequence[Shard]:
        """All rows that this process holds, as they are after the last step."""

    def pieces(self) -> list[PieceView]:
        """The parts of the tables that this process holds."""

    def rewriting(self) -> AbstractContextManager[list[PieceView]]:
        """The same, to be written to."""

    def start_marks(self, name: str) -> None:
        """Mark the rows that are updated from now on, see :attr:`PieceView.marks`."""


@runtime_checkable
class HasState(Protocol):
    """What torch's modules, schedulers, scalers and their like have."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take them back."""


class HasTensors(Protocol):
    """What has a state of tensors."""

    def state(self) -> dict[str, Tensor]:
        """All of it; empty where there is none."""

    def load_state(self, tensors: Mapping[str, Tensor], /) -> None:
        """The inverse."""


class Trained(Protocol):
    """What a checkpoint of a run is of: :class:`pibroch.train.session.Session`.

    Attributes:
        has_rows: whether the rows are what the seed makes of them, or were; else somebody is to
            write them all.
    """

    has_rows: bool

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""

    @property
    def dataset(self) -> EncodedDataset:
        """The data."""

    @property
    def embeddings(self) -> TablesOfRanks:
        """The tables."""

    @property
    def model(self) -> nn.Module:
        """The dense layers."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of the dense layers."""

    @property
    def averages(self) -> HasState | None:
        """Moving averages of the dense layers, where the run keeps them, named ``module.``."""

    @property
    def windows(self) -> HasTensors | None:
        """Figures by event time, where the data have event times."""

    def fill_rows(self) -> None:
        """Make the rows what the seed makes of them, unless they are, or were."""
