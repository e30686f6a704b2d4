"""What training minimises: ``[loss]`` of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

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


SPECS = (
    Spec(
        "bce",
        "binary cross-entropy of clicks",
        BinaryCrossEntropyConfig,
        "pibroch.models.losses:BinaryCrossEntropy",
    ),
)
