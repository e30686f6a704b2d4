"""The whole configuration of a run, as a recipe spells it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pibroch.config.base import Section
from pibroch.config.data import DataConfig
from pibroch.config.embedding import EmbeddingSection
from pibroch.config.loss import BinaryCrossEntropyConfig, LossConfig, TaskConfig
from pibroch.config.model import ModelConfig
from pibroch.config.optimizer import AdamConfig, DenseOptimizerConfig, ScheduleConfig
from pibroch.config.train import TrainConfig


class RunConfig(Section):
    """A resolved recipe: everything that decides the numbers of a run.

    Attributes:
        seed: of initial weights, shuffling and dropout.
        model: a DLRM when absent.
        loss: what training minimises; the binary cross-entropy when absent.
        tasks: of data with several labels, by label, what is said of one alone.
        optimizer: of the dense layers.
        schedule: a factor on the learning rates of dense layers and embeddings alike.
    """

    seed: int = Field(default=1, ge=0, lt=2**31)
    data: DataConfig
    model: ModelConfig = ModelConfig()
    loss: LossConfig = BinaryCrossEntropyConfig()
    tasks: dict[str, TaskConfig] = Field(default_factory=dict)
    embedding: EmbeddingSection = EmbeddingSection()
    optimizer: DenseOptimizerConfig = AdamConfig(name="adam", lr=1e-3)
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig

    @field_validator("train")
    @classmethod
    def _one_length(cls, train: TrainConfig, info: ValidationInfo) -> TrainConfig:
        data = info.data.get("data")
        has_stream = isinstance(data, DataConfig) and data.stream is not None
        if not has_stream and (train.epochs is None) == (train.steps is None):
            raise ValueError("needs exactly one of `epochs` and `steps`")
        return train

    @model_validator(mode="after")
    def _end_of_schedule(self) -> Self:
        if self.data.stream is None:
            return self
        steps = self.train.steps
        spans_run = self.schedule.name in ("cosine", "linear") and self.schedule.decay_steps is None
        if steps is None and spans_run:
            raise ValueError(
                f"`schedule.name = {self.schedule.name!r}` over a stream without end needs"
                " `schedule.decay_steps`"
            )
        return self

    @model_validator(mode="after")
    def _one_rendezvous(self) -> Self:
        places = {self.data.rendezvous, self.embedding.exchange.helper_rendezvous()} - {None}
        if len(places) > 1:
            raise ValueError(
                "one rendezvous for servers and processors, in `embedding.exchange.rendezvous`,"
                " `data.rendezvous`, or both"
            )
        return self
