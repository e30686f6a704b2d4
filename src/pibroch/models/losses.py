"""Losses: logits and labels in, the mean over the samples out.

Shape legend: B samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor
from torch.nn import functional

from pibroch.config.loss import (
    LOSSES,
    BinaryCrossEntropyConfig,
    FocalConfig,
    LossConfig,
    SquaredErrorConfig,
    TaskConfig,
)
from pibroch.data.schema import Schema

if TYPE_CHECKING:
    from pibroch.config import RunConfig


class Loss(ABC):
    """What training minimises; one of one's own derives from it, see ``docs/my-model.md``.

    Args:
        config: an instance of ``section``.

    Attributes:
        section: what a recipe says of it.
        labels: what labels it is for: 0 and 1 (``binary``), or these and other numbers (``any``).
        gives_probabilities: whether the sigmoid of a logit is the probability of label 1; else the
            score of a sample is its logit.
    """

    section: ClassVar[type[LossConfig]] = LossConfig
    labels: ClassVar[Literal["binary", "any"]] = "any"
    gives_probabilities: ClassVar[bool] = True

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean over the samples of a rank, a scalar.

        Ranks' means are weighted with their numbers of samples, so that the loss is the mean over
        the global batch; it must be a mean of what each sample gives by itself.

        Args:
            logits: float32 ``[B]``, B at least 1.
            labels: float32 ``[B]``.
            weights: float32 ``[B]``, a factor of what each sample gives; 1 when absent. A loss
                without this argument trains on data without weights.
        """


class BinaryCrossEntropy(Loss):
    """The log loss of clicks, in nats."""

    section = BinaryCrossEntropyConfig
    labels = "binary"

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """See :class:`Loss`."""
        return functional.binary_cross_entropy_with_logits(logits, labels, weights)


class SquaredError(Loss):
    """``(logit - label)^2``: the logit is the prediction."""

    section = SquaredErrorConfig
    gives_probabilities = False

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """See :class:`Loss`."""
        return _mean((logits - labels).square(), weights)


class Focal(Loss):
    """``-(1 - p_t)^gamma log p_t``, where ``p_t`` is the probability given to the label.

    Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, Eq. 4 and 5; with ``alpha`` the
    positives weigh ``alpha`` and the negatives ``1 - alpha``.
    """

    section = FocalConfig
    labels = "binary"

    def __init__(self, config: FocalConfig) -> None:
        super().__init__(config)
        self._gamma = config.gamma
        self._alpha = config.alpha

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """See :class:`Loss`."""
        margins = logits * (2 * labels - 1)  # p_t = sigmoid(margin)
        # A power of 1 - p_t would have no slope where that is rounded to 0.
        missed = (self._gamma * functional.logsigmoid(-margins)).exp()
        loss = -missed * functional.logsigmoid(margins)
        if self._alpha is not None:
            loss = loss * (self._alpha * labels + (1 - self._alpha) * (1 - labels))
        return _mean(loss, weights)


def logit_labels(config: RunConfig, schema: Schema) -> tuple[str, ...]:
    """Labels whose loss gives no probabilities: the scores of their samples are logits."""
    names = []
    for label in schema.targets:
        section = config.tasks.get(label, TaskConfig()).loss or config.loss
        loss: Loss = LOSSES.find(section.name).build(section)
        if not loss.gives_probabilities:
            names.append(label)
    return tuple(names)


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.mean() if weights is None else (losses * weights).mean()
