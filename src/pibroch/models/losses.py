"""Losses: logits and labels in, the mean over the samples out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from pibroch.config.loss import BinaryCrossEntropyConfig, LossConfig


class Loss(ABC):
    """What training minimises; one of one's own derives from it, see ``docs/my-model.md``.

    Args:
        config: an instance of ``section``.

    Attributes:
        section: what a recipe says of it.
    """

    section: ClassVar[type[LossConfig]] = LossConfig

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the samples of a rank, a scalar.

        Ranks' means are weighted with their numbers of samples, so that the loss is the mean over
        the global batch; it must be a mean of what each sample gives by itself.

        Args:
            logits: float32 ``[B]``, B at least 1.
            labels: float32 ``[B]``.
        """


class BinaryCrossEntropy(Loss):
    """The log loss of clicks, in nats."""

    section = BinaryCrossEntropyConfig

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See :class:`Loss`."""
        return functional.binary_cross_entropy_with_logits(logits, labels)
