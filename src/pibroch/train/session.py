"""What is trained: model, embeddings, dense optimizer and data, built from one configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pibroch.config import RunConfig
from pibroch.config.embedding import NormalConfig, UniformConfig
from pibroch.data import EncodedDataset, JaggedBatch
from pibroch.embedding import Initializer, Normal, Table, Uniform, Zeros
from pibroch.exchange import Embeddings
from pibroch.models import build_model
from pibroch.models.build import MODELS
from pibroch.train.optimizers import build_dense_optimizer, build_sparse_optimizer
from pibroch.train.schedule import learning_rate_factor


@dataclass(slots=True)
class Session:
    """Everything that a step reads and writes.

    Attributes:
        config: the resolved configuration.
        dataset: the encoded data.
        embeddings: tables with their optimizer.
        model: the dense layers.
        optimizer: of the dense layers.
    """

    config: RunConfig
    dataset: EncodedDataset
    embeddings: Embeddings
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def logits(self, batch: JaggedBatch) -> Tensor:
        """Float32 logits ``[B]``, under bfloat16 autocast when the recipe asks for it."""
        embedded_BFD = self.embeddings(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.train.bf16):
            logits: Tensor = self.model(batch.dense, embedded_BFD)
        return logits.float()

    def loss(self, batch: JaggedBatch) -> Tensor:
        """Mean binary cross-entropy of a batch."""
        return functional.binary_cross_entropy_with_logits(self.logits(batch), batch.labels)

    def set_training(self, training: bool) -> None:
        """Switch dropout, batch norm and row updates on or off."""
        self.model.train(training)
        self.embeddings.train(training)

    def set_learning_rates(self, step: int, total_steps: int, plateaus: int) -> None:
        """Set both learning rates for ``step`` (from 1), after ``plateaus`` evaluations without improvement."""
        schedule = self.config.schedule
        factor = learning_rate_factor(schedule, step, total_steps) * schedule.plateau_factor**plateaus
        self.embeddings.learning_rate = self.config.embedding.optimizer.lr * factor
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor


def build_session(config: RunConfig, dataset: EncodedDataset) -> Session:
    """Freshly initialised; the seed decides every initial weight and the dropout after it."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.seed)
    schema = dataset.schema
    model = build_model(config.model, len(schema.dense), len(schema.categorical))
    embeddings = Embeddings(
        build_tables(config, dataset.num_rows),
        build_sparse_optimizer(config.embedding.optimizer),
        config.embedding.exchange,
        config.seed,
    )
    return Session(config, dataset, embeddings, model, build_dense_optimizer(config.optimizer, model.parameters()))


def build_tables(config: RunConfig, num_rows: dict[str, int]) -> list[Table]:
    """A table for each feature, in the order of ``num_rows``, as wide as the model wants."""
    dim = config.model.dim
    table_dim = MODELS[config.model.name].table_dim(dim)
    initializer = _initializer(config, table_dim - dim)
    return [Table(name, rows, table_dim, initializer=initializer) for name, rows in num_rows.items()]


def _initializer(config: RunConfig, num_first_order: int) -> Initializer:
    init = config.embedding.init
    if isinstance(init, NormalConfig):
        return Normal(init.std, zero_columns=num_first_order)
    return Uniform(init.bound) if isinstance(init, UniformConfig) else Zeros()
