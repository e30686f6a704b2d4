"""The section of the two-tower model: ``[model]`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pibroch.config.model import DeepConfig
from pibroch.config.registry import Spec


class TwoTowerConfig(DeepConfig):
    """Settings of :class:`pibroch.models.TwoTower`; both towers have the hidden layers ``top``.

    Attributes:
        item_features: names of the item's features, of which the first is its id; the last feature
            when absent. All others, and dense ones, are the user's.
        vector_width: numbers of a user's or an item's vector.
        normalize: make vectors of length 1.
        temperature: by which products are divided.
    """

    name: Literal["two_tower"] = "two_tower"
    item_features: tuple[str, ...] = ()
    vector_width: int = Field(default=32, ge=1, le=4096)
    normalize: bool = False
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)


SPECS = (
    Spec(
        "two_tower",
        "a vector of the user times one of the item",
        TwoTowerConfig,
        "pibroch.models.two_tower:TwoTower",
    ),
)
