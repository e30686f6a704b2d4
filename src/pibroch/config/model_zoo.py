"""Sections of the house's models that stand on products beside sums: ``[model]`` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pibroch.config.model import (
    Activation,
    CrossConfig,
    DeepConfig,
    HiddenConfig,
    HouseConfig,
    Structure,
    Widths,
)
from pibroch.config.registry import Spec
from pibroch.errors import ConfigError


class GDCNConfig(CrossConfig):
    """Settings of :class:`pibroch.models.GDCN`; ``cross_rank`` is that of gates, too."""

    name: Literal["gdcn"] = "gdcn"


class FinalMLPConfig(DeepConfig):
    """Settings of :class:`pibroch.models.FinalMLP`.

    Attributes:
        second_top: hidden widths of the second stream; those of the first, ``top``, when absent.
        heads: of the fusion; they divide the last widths of both streams.
        gate: multiply each stream's input with gates.
        gate_hidden: hidden widths of the networks of gates.
        contexts: names of the features by which each stream's gates are decided; without any they
            are learned, the same for all samples.
    """

    name: Literal["finalmlp"] = "finalmlp"
    second_top: Widths | None = None
    heads: int = Field(default=1, ge=1)
    gate: bool = True
    gate_hidden: Widths = (64,)
    contexts: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def context_numbers(self, features: tuple[str, ...]) -> list[list[int]]:
        """The features of each context by their number.

        Raises:
            ConfigError: for one that is not there.
        """
        missing = [name for names in self.contexts for name in names if name not in features]
        if missing:
            raise ConfigError(
                f"feature {missing[0]!r} in model.contexts",
                f"one of {', '.join(features)}",
                "correct the name",
            )
        return [[features.index(name) for name in names] for names in self.contexts]


class FinalNetConfig(DeepConfig):
    """Settings of :class:`pibroch.models.FinalNet`, whose layers need no activation.

    Attributes:
        blocks: networks of hidden widths ``top``, one or two.
        field_gate: give the first block all fields' vectors a second time, behind a gate.
        residual: how a layer's products join its sums, beside them or added to them.
    """

    name: Literal["finalnet"] = "finalnet"
    activation: Activation = "identity"
    blocks: Literal[1, 2] = 2
    field_gate: bool = True
    residual: Literal["concat", "sum"] = "concat"


class MaskNetConfig(DeepConfig):
    """Settings of :class:`pibroch.models.MaskNet`.

    Attributes:
        structure: blocks of widths ``top`` one after the other (``stacked``), or
            side by side under a deep network, which alone has ``batch_norm`` (``parallel``).
        mask_blocks: number of parallel blocks.
        mask_width: of what a parallel block gives.
        mask_ratio: width of a mask's hidden layer by that of the mask.
    """

    name: Literal["masknet"] = "masknet"
    structure: Structure = "parallel"
    mask_blocks: int = Field(default=3, ge=1, le=64)
    mask_width: int = Field(default=64, ge=1)
    mask_ratio: float = Field(default=1.0, gt=0, le=64)


class QNNConfig(HiddenConfig):
    """Settings of :class:`pibroch.models.QNN`.

    Attributes:
        cross_layers: number of quadratic layers.
        cross_rows: linear maps whose sum is a layer's factor (M).
        heads: parts of each embedding, see there; they divide ``dim``.
    """

    name: Literal["qnn"] = "qnn"
    cross_layers: int = Field(default=3, ge=1, le=64)
    cross_rows: int = Field(default=2, ge=1, le=64)
    heads: int = Field(default=1, ge=1)


class DCNv3Config(HouseConfig):
    """Settings of :class:`pibroch.models.DCNv3`.

    Attributes:
        cross_layers: crosses of each of both networks.
        dropout: after each cross.
    """

    name: Literal["dcnv3"] = "dcnv3"
    cross_layers: int = Field(default=3, ge=1, le=64)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)


class ExpertsConfig(DeepConfig):
    """Of models of several tasks, whose own networks have the hidden widths ``top``.

    Attributes:
        expert_hidden: hidden widths of an expert.
    """

    expert_hidden: Annotated[Widths, Field(min_length=1)] = (256,)


class MMoEConfig(ExpertsConfig):
    """Settings of :class:`pibroch.models.MMoE`.

    Attributes:
        experts: that all tasks share.
    """

    name: Literal["mmoe"] = "mmoe"
    experts: int = Field(default=4, ge=1, le=256)


class PLEConfig(ExpertsConfig):
    """Settings of :class:`pibroch.models.PLE`.

    Attributes:
        levels: of experts, one on what the other gives.
        task_experts: of each task in a level.
        shared_experts: of all tasks in a level.
    """

    name: Literal["ple"] = "ple"
    levels: int = Field(default=2, ge=1, le=16)
    task_experts: int = Field(default=2, ge=1, le=256)
    shared_experts: int = Field(default=2, ge=1, le=256)


SPECS = (
    Spec("gdcn", "gated crosses and a deep network", GDCNConfig, "pibroch.models.gdcn:GDCN"),
    Spec(
        "finalmlp",
        "two gated networks and a bilinear fusion",
        FinalMLPConfig,
        "pibroch.models.finalmlp:FinalMLP",
    ),
    Spec(
        "finalnet",
        "networks whose layers multiply their halves",
        FinalNetConfig,
        "pibroch.models.finalnet:FinalNet",
    ),
    Spec("masknet", "layers behind masks", MaskNetConfig, "pibroch.models.masknet:MaskNet"),
    Spec("qnn", "quadratic layers", QNNConfig, "pibroch.models.qnn:QNN"),
    Spec(
        "dcnv3",
        "crosses of linear and of exponential order",
        DCNv3Config,
        "pibroch.models.dcnv3:DCNv3",
    ),
    Spec("mmoe", "several tasks with shared experts", MMoEConfig, "pibroch.models.mmoe:MMoE"),
    Spec("ple", "several tasks with experts in levels", PLEConfig, "pibroch.models.ple:PLE"),
)
