"""What is trained: model, embeddings, dense optimizer and data, built from one configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pibroch.collectives import data_parallel
from pibroch.collectives.world import World
from pibroch.config import RunConfig
from pibroch.config.exchange import ExchangeSection
from pibroch.config.initializer import INITIALIZERS
from pibroch.config.model import TowerConfig
from pibroch.config.row_index import RowIndexConfig
from pibroch.data import EncodedDataset, JaggedBatch
from pibroch.embedding import Table, features_of
from pibroch.embedding.row_index import kind_of
from pibroch.errors import ConfigError
from pibroch.exchange import Embeddings, place_towers
from pibroch.exchange.towers import TowersSection
from pibroch.models import build_model, set_place
from pibroch.models.build import model_class, pooling_of
from pibroch.models.pairs import PairModel
from pibroch.process import threads_of_rank
from pibroch.train.accumulation import Passes, check_accumulation
from pibroch.train.catalogue import check_items
from pibroch.train.criterion import Criterion
from pibroch.train.in_batch import InBatchCriterion
from pibroch.train.optimizers import (
    build_dense_optimizer,
    build_sparse_optimizer,
    learning_rate_factor,
)
from pibroch.train.roles import Helpers
from pibroch.train.windows import ProgressiveWindows

if TYPE_CHECKING:
    from pibroch.processors import Processors


@dataclass(frozen=True, slots=True)
class Predicting:
    """A model that predicts, with its embeddings.

    Attributes:
        model: its layers.
        looked_up: gives what the layers are given of a batch.
        bf16: whether the layers compute in bfloat16.
    """

    model: nn.Module
    looked_up: Callable[[JaggedBatch], Any]
    bf16: bool

    def __call__(self, batch: JaggedBatch) -> Tensor:
        """Float32 logits."""
        return _logits(self.model, batch.dense, partial(self.looked_up, batch), self.bf16)


def _logits(model: nn.Module, dense: Tensor, embedded: object, bf16: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits: Tensor = model(dense, embedded)
    return logits.float()


@dataclass(slots=True)
class Session:
    """Everything that a step reads and writes.

    Attributes:
        config: the resolved configuration.
        dataset: the encoded data.
        embeddings: tables with their optimizer.
        model: the dense layers.
        optimizer: of the dense layers.
        averages: moving averages of the dense layers, when the recipe asks for averages.
        world: the ranks that hold the same session; they take each step, prediction and checkpoint
            together.
        processors: that make the batches; this process does when absent.
        has_rows: whether the rows are what the seed makes of them, or were; else somebody is to
            write them all.
        passes: in which the dense layers take a step's samples; ``None`` for one.
        criterion: what training minimises.
        windows: what predictions of steps are worth, by event time; ``None`` where the data have no
            event times.
    """

    config: RunConfig
    dataset: EncodedDataset
    embeddings: Embeddings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    averages: AveragedModel | None
    world: World
    processors: Processors | None = None
    has_rows: bool = True
    passes: Passes | None = None
    criterion: Criterion | InBatchCriterion = field(init=False)
    windows: ProgressiveWindows | None = field(init=False, default=None)
    logits: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        settings = self.config.train.windows
        if settings is not None or self.dataset.schema.time is not None:
            channel = self.world.control
            self.windows = ProgressiveWindows(self.dataset.schema, settings, channel)
        channel = self.world.control
        if self.config.loss.name == "in_batch_softmax":
            self.criterion = InBatchCriterion(self.config, self.dataset, self.model, channel)
        else:
            if isinstance(self.model, PairModel) and self.model.sequence is not None:
                raise ConfigError(
                    f"model.all_positions with the loss {self.config.loss.name!r}",
                    "the loss in_batch_softmax, which compares pairs",
                    "pass --set loss.name=in_batch_softmax, or leave it out",
                )
            self.criterion = Criterion(self.config, self.dataset.schema, channel)
        if self.config.train.items is not None:
            check_items(self.model, self.dataset, self.config.train.items)
        if self.passes is not None:
            check_accumulation(self.model, self.criterion.compares)

    def fill_rows(self) -> None:
        """Make the rows what the seed makes of them, unless they are, or were."""
        if not self.has_rows:
            for shard in self.embeddings.exchange.shards:
                shard.fill(self.config.seed)
            self.has_rows = True

    def loss(self, batch: JaggedBatch, step: int) -> Tensor:
        """The mean loss of this rank's batch, 0 without samples, with dropout.

        Its backward updates the rows.
        """
        if isinstance(self.criterion, InBatchCriterion):
            self.criterion.show_items(batch)
        if self.passes is None:
            logits = self._training_logits(step, batch, partial(self.embeddings, batch))
            loss = self.criterion(logits, batch)
        else:
            embedded = self.embeddings(batch)
            logits_of = partial(self._training_logits, step)
            loss, logits = self.passes.run(batch, embedded, logits_of, self.criterion)
        if self.windows is not None:
            self.windows.add(step, logits, batch)
        self.logits = logits.detach()
        return loss

    def _training_logits(self, step: int, batch: JaggedBatch, embedded: object) -> Tensor:
        places = None if batch.assigned is None else batch.assigned.places
        set_place(self.model, self.config.seed, step, batch.first_sample, places)
        return _logits(self.model, batch.dense, embedded, self.config.train.bf16)

    def update_dense(self) -> None:
        """Update the dense layers by their gradients, then their averages."""
        self.optimizer.step()
        if self.averages is not None:
            self.averages.update_parameters(self.model)

    @contextmanager
    def predicting(self) -> Iterator[Predicting]:
        """Yields what gives float32 logits of batches; nothing is updated.

        By the averages of weights when they are kept.
        """
        model: nn.Module = self.model
        averaged: AbstractContextManager[None] = nullcontext()
        if self.averages is not None:
            model = self.averages.module
            averaged = self.embeddings.averaged()
        self.set_training(False)
        try:
            with torch.inference_mode(), averaged:
                model.eval()
                yield Predicting(model, self.embeddings, self.config.train.bf16)
        finally:
            self.set_training(True)

    def set_training(self, training: bool) -> None:
        """Switch dropout, batch norm and row updates on or off."""
        self.model.train(training)
        self.embeddings.train(training)

    def set_learning_rates(self, step: int, total_steps: int | None, plateaus: int) -> None:
        """Set both learning rates for ``step`` (from 1), after some plateaus.

        A plateau is an evaluation without improvement.
        """
        schedule = self.config.schedule
        factor = (
            learning_rate_factor(schedule, step, total_steps) * schedule.plateau_factor**plateaus
        )
        self.embeddings.learning_rate = self.config.embedding.optimizer.lr * factor
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor


def build_session(
    config: RunConfig,
    dataset: EncodedDataset,
    world: World | None = None,
    helpers: Helpers | None = None,
    has_rows: bool = True,
) -> Session:
    """Freshly initialised; the seed decides every initial weight and the dropout after it.

    Every rank of a world calls it.

    Args:
        config: the resolved configuration.
        dataset: the data.
        world: one process when absent.
        helpers: the processes that the configuration asks for, see :mod:`pibroch.train.roles`; none
            when absent.
        has_rows: whether to fill the rows; they take long to make, and a run that goes on has them
            elsewhere.
    """
    world = world or World.alone()
    helpers = helpers or Helpers()
    if config.train.threads is not None or world.ranks.world_size > 1:
        torch.set_num_threads(config.train.threads or threads_of_rank())
    torch.manual_seed(config.seed)
    schema = dataset.schema
    exchange = config.embedding.exchange.for_ranks(world.ranks.world_size)
    tables = build_tables(config, dataset.num_rows, schema.readers)
    names = features_of(tables)
    embeddings = Embeddings(
        tables,
        build_sparse_optimizer(config.embedding.optimizer, config.train.average),
        exchange.name,
        config.seed if has_rows else None,
        world.ranks.open_channel(),
        **{**exchange.options(helpers.workers), **groups_of_towers(config, exchange, names)},
    )
    num_tasks = len(schema.label_columns)
    model = build_model(config.model, len(schema.dense), len(names), names, num_tasks)
    model = place_towers(model, embeddings)
    passes = None
    if config.train.accumulate > 1:
        passes = Passes(model, -(-config.train.batch_size // world.ranks.world_size))
    count = None if passes is None else passes.samples_of_call
    model = data_parallel(model, world.ranks, num_samples=count)
    optimizer = build_dense_optimizer(config.optimizer, model.parameters())
    averages = _averages(model, config.train.average)
    processors = _processors(helpers.processors, world)
    return Session(
        config, dataset, embeddings, model, optimizer, averages, world, processors, has_rows, passes
    )


def groups_of_towers(
    config: RunConfig, exchange: ExchangeSection, features: tuple[str, ...]
) -> dict[str, list[list[str]]]:
    """The groups of the model's towers, for an exchange by towers that was given none."""
    if not isinstance(exchange, TowersSection) or exchange.groups is not None:
        return {}
    if not isinstance(config.model, TowerConfig):
        return {}
    return {
        "groups": [
            [features[number] for number in group]
            for group in config.model.towers.numbers(features)
        ]
    }


def _processors(names: tuple[str, ...], world: World) -> Processors | None:
    if not names:
        return None
    from pibroch.processors import Processors  # with all of RPC, which nobody else needs

    return Processors(names, world.ranks)


def build_tables(
    config: RunConfig,
    num_rows: Mapping[str, int | None],
    readers: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Table]:
    """The tables, in the order of ``num_rows``, as wide as the model wants, and pooled if it wants.

    Args:
        config: of the run.
        num_rows: ids of each table in the data, ``None`` where they are raw.
        readers: of each table the features that read it; one of its name when absent.

    Raises:
        ConfigError: where the configuration names other columns, or has no number of rows for raw
            ids.
    """
    for column in config.embedding.tables:
        if column not in num_rows:
            raise ConfigError(
                f"[embedding.tables.{column}]",
                f"a column of the data with a table, one of {', '.join(num_rows)}",
                "correct the name",
            )
    dim = config.model.dim
    table_dim = model_class(config.model.name).table_dim(dim)
    init = config.embedding.init
    initializer = INITIALIZERS.find(init.name).build(**init.options(table_dim - dim))
    dtype = config.embedding.dtype
    indices = {name: config.embedding.rows_of(name) for name in num_rows}
    return [
        Table(
            name,
            _capacity(name, indices[name], num_ids),
            table_dim,
            () if readers is None else readers[name],
            pooling_of(config.model),
            initializer,
            dtype=dtype,
            rows=kind_of(indices[name]),
        )
        for name, num_ids in num_rows.items()
    ]


def _capacity(column: str, index: RowIndexConfig, num_ids: int | None) -> int:
    """Rows of a column's table."""
    capacity = index.num_rows(num_ids)
    if capacity is None:
        raise ConfigError(
            f"rows by the index {index.name!r} for column {column!r}, whose ids are raw",
            "an index with a capacity of its own, such as 'hashed'",
            f"write [embedding.rows] or [embedding.tables.{column}.rows] with"
            ' name = "hashed" and capacity = ROWS',
        )
    return capacity


def _averages(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
