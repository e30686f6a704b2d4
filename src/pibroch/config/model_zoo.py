"""Sections of the house's models that stand on products beside sums: ``[model]`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pibroch.config.model import CrossConfig
from pibroch.config.registry import Spec


class GDCNConfig(CrossConfig):
    """Settings of :class:`pibroch.models.GDCN`; ``cross_rank`` is that of gates, too."""

    name: Literal["gdcn"] = "gdcn"


SPECS = (Spec("gdcn", "gated crosses and a deep network", GDCNConfig, "pibroch.models.gdcn:GDCN"),)
