"""What a step minimises: the losses of all tasks, as a mean over the global batch.

Shape legend: B_r samples of this rank, B of all ranks, T tasks.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.config import RunConfig
from pibroch.config.loss import LOSSES, LossConfig, TaskConfig
from pibroch.data import JaggedBatch
from pibroch.data.schema import Schema
from pibroch.errors import ConfigError
from pibroch.models.losses import Loss
from pibroch.models.ranking_losses import RankingLoss


class Criterion:
    """The sum over tasks of weight times loss.

    Args:
        config: names the losses.
        schema: of the data, whose labels are the tasks.
        channel: to the other ranks, which ranking losses ask for their logits.

    Raises:
        ConfigError: for a task that is none, or a loss that does not fit its label or cannot take
            the weights of the data.

    Attributes:
        compares: whether a sample's loss depends on other samples.
    """

    def __init__(self, config: RunConfig, schema: Schema, channel: Channel) -> None:
        self._channel = channel
        if unknown := sorted(config.tasks.keys() - schema.targets.keys()):
            need = f"a label of the data, one of {', '.join(schema.targets)}"
            raise ConfigError(f"[tasks.{unknown[0]}]", need, "correct the name")
        tasks = [config.tasks.get(label, TaskConfig()) for label in schema.targets]
        self._weights = [task.weight for task in tasks]
        self._losses = [
            _loss_of(task.loss or config.loss, label, schema)
            for task, label in zip(tasks, schema.targets, strict=True)
        ]
        self.compares = any(isinstance(loss, RankingLoss) for loss in self._losses)

    def __call__(self, logits: Tensor, batch: JaggedBatch) -> Tensor:
        """The loss of this rank's part of a batch.

        Its mean over the ranks, weighted with their samples, is that over the global batch. With
        ranking losses every rank calls this at the same time, and it waits for the others.

        Args:
            logits: float32 ``[B_r]``, or ``[B_r, T]`` of several tasks.
            batch: of which these are, perhaps without samples.
        """
        shared = self._gather(logits, batch) if self.compares else None
        if batch.batch_size == 0:
            return logits.sum()
        total: Tensor | None = None
        for task, (loss, weight) in enumerate(zip(self._losses, self._weights, strict=True)):
            own = _column(logits, task)
            if isinstance(loss, RankingLoss):
                assert shared is not None
                value = shared.loss(loss, task, own)
            elif batch.sample_weights is None:
                value = loss(own, _column(batch.labels, task))
            else:
                value = loss(own, _column(batch.labels, task), batch.sample_weights)
            value = value if weight == 1.0 else value * weight
            total = value if total is None else total + value
        assert total is not None
        return total

    def _gather(self, logits: Tensor, batch: JaggedBatch) -> _GlobalBatch:
        size = batch.batch_size
        num_tasks = len(self._losses)
        weights = torch.ones(size) if batch.sample_weights is None else batch.sample_weights
        groups = torch.zeros(size, dtype=torch.int64) if batch.groups is None else batch.groups
        labels = batch.labels.reshape(size, num_tasks) if size else torch.empty(0, num_tasks)
        own = torch.cat([logits.detach().reshape(size, num_tasks), labels, weights[:, None]], 1)
        numbers = self._channel.gather_tensors(own.double())
        rank = self._channel.ranks.rank
        return _GlobalBatch(
            torch.cat(numbers).numpy(),
            torch.cat(self._channel.gather_tensors(groups)).numpy(),
            sum(len(each) for each in numbers[:rank]),
        )


class _GlobalBatch:
    """What all ranks know of all samples.

    Args:
        numbers: logits, labels and weights, float64 ``[B, 2 T + 1]``.
        groups: ``[B]``.
        first: place of this rank's first sample.
    """

    def __init__(self, numbers: NDArray[np.float64], groups: NDArray[np.int64], first: int) -> None:
        self._numbers = numbers
        self._groups = groups
        self._first = first

    def loss(self, loss: RankingLoss, task: int, own: Tensor) -> Tensor:
        """The loss, whose gradient by this rank's logits ``own`` ``[B_r]`` is that of all samples.

        It is multiplied with ``B / B_r``, as it is weighted with ``B_r / B`` afterwards.
        """
        num_tasks = self._numbers.shape[1] // 2
        logits = self._numbers[:, task]
        labels = self._numbers[:, num_tasks + task]
        value, gradient = loss.of_batch(logits, labels, self._numbers[:, -1], self._groups)
        scale = len(gradient) / len(own)
        here = torch.from_numpy(gradient[self._first : self._first + len(own)] * scale)
        slope = (own * here.float()).sum()
        return slope - slope.detach() + value


def _column(tensor: Tensor, task: int) -> Tensor:
    return tensor if tensor.ndim == 1 else tensor[:, task]


def _loss_of(config: LossConfig, label: str, schema: Schema) -> Loss:
    loss: Loss = LOSSES.find(config.name).build(config)
    target = schema.targets[label]
    if loss.labels == "binary" and target.kind == "number":
        need = "a loss of numbers, such as mse"
        raise ConfigError(
            f"loss {config.name!r} for the label {label!r}, which holds numbers",
            need,
            f"set [loss] name, or in [tasks.{label}] loss, to mse",
        )
    if config.name == "softmax" and schema.group is None:
        raise ConfigError(
            "loss 'softmax' of data without groups",
            "groups of samples that are compared",
            "name a column as `group` in the schema, and prepare the data again",
        )
    takes_weights = "weights" in inspect.signature(type(loss).__call__).parameters
    if schema.weight is not None and not takes_weights:
        raise ConfigError(
            f"loss {config.name!r}, which takes no weights, for data that have some",
            "__call__(logits, labels, weights)",
            "add the argument, see docs/my-model.md",
        )
    return loss
