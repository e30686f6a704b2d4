"""What training minimises: ``[loss]`` and ``[tasks]`` of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pibroch.config.base import Section
from pibroch.config.registry import Choice, Registry, Spec

LOSSES = Registry(
    "loss", "pibroch.losses", Spec, "pibroch.models.losses:Loss", ["pibroch.config.loss:SPECS"]
)


class LossConfig(Choice):
    """Settings of a loss; each adds its own."""

    registry: ClassVar[Registry[Spec]] = LOSSES

    name: str = "bce"


class BinaryCrossEntropyConfig(LossConfig):
    """Of the binary cross-entropy: nothing to choose."""

    name: Literal["bce"] = "bce"


class SquaredErrorConfig(LossConfig):
    """Of the squared error: nothing to choose."""

    name: Literal["mse"] = "mse"


class FocalConfig(LossConfig):
    """Settings of :class:`pibroch.models.losses.Focal`.

    Attributes:
        gamma: how much less a sample counts that is predicted well.
        alpha: share of the positives' weight; all weigh the same when absent.
    """

    name: Literal["focal"] = "focal"
    gamma: float = Field(default=2.0, ge=0)
    alpha: float | None = Field(default=None, gt=0, lt=1)


class PairwiseConfig(LossConfig):
    """Of the pairwise loss: nothing to choose."""

    name: Literal["pairwise"] = "pairwise"


class SoftmaxConfig(LossConfig):
    """Of the softmax over groups: nothing to choose."""

    name: Literal["softmax"] = "softmax"


class InBatchSoftmaxConfig(LossConfig):
    """Settings of :class:`pibroch.models.InBatchSoftmax`.

    Attributes:
        correct_bias: take the logarithm of an item's share of the samples from its logits.
    """

    name: Literal["in_batch_softmax"] = "in_batch_softmax"
    correct_bias: bool = True


class TaskConfig(Section):
    """The ``[tasks.LABEL]`` table, of data with several labels.

    Attributes:
        loss: of this task; that of ``[loss]`` when absent.
        weight: of its loss in the sum over tasks.
    """

    loss: LossConfig | None = None
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)


_LOSSES = "pibroch.models.losses"
SPECS = (
    Spec(
        "bce",
        "binary cross-entropy of clicks",
        BinaryCrossEntropyConfig,
        f"{_LOSSES}:BinaryCrossEntropy",
    ),
    Spec("mse", "squared error of numbers", SquaredErrorConfig, f"{_LOSSES}:SquaredError"),
    Spec("focal", "cross-entropy of what is hard to predict", FocalConfig, f"{_LOSSES}:Focal"),
    Spec(
        "pairwise",
        "pairs of a better and a worse sample (BPR)",
        PairwiseConfig,
        "pibroch.models.ranking_losses:Pairwise",
    ),
    Spec(
        "softmax",
        "the share of the positives in their group",
        SoftmaxConfig,
        "pibroch.models.ranking_losses:GroupSoftmax",
    ),
    Spec(
        "in_batch_softmax",
        "a user's item among all items of the batch",
        InBatchSoftmaxConfig,
        "pibroch.models.in_batch_softmax:InBatchSoftmax",
    ),
)
