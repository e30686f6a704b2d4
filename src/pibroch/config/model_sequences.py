"""Sections of the house's models that read sequences: ``[model]`` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pibroch.config.model import DeepConfig, Widths
from pibroch.config.registry import Spec


class SequenceConfig(DeepConfig):
    """Of models that read sequences.

    Attributes:
        histories: of each sequence, a feature with ``multi_hot``, the feature of the item that it
            is compared with, as ``{history = "item"}``.
        max_length: items of a sequence that are read, the last ones; shorter ones are padded.
    """

    histories: dict[str, str] = Field(default_factory=dict)
    max_length: int = Field(default=50, ge=1, le=1 << 16)


class DINConfig(SequenceConfig):
    """Settings of :class:`pibroch.models.DIN`.

    Attributes:
        attention_hidden: hidden widths of the networks that weigh items.
        attention_softmax: let the weights of a sequence's items add up to 1.
    """

    name: Literal["din"] = "din"
    attention_hidden: Widths = (64,)
    attention_softmax: bool = False


class TransformerConfig(SequenceConfig):
    """Of models with transformers.

    Attributes:
        blocks: of self-attention and a network of two layers, one after the other.
        attention_heads: of self-attention; they divide ``dim``.
    """

    blocks: int = Field(default=1, ge=1, le=64)
    attention_heads: int = Field(default=1, ge=1)


class BSTConfig(TransformerConfig):
    """Settings of :class:`pibroch.models.BST`."""

    name: Literal["bst"] = "bst"


class SASRecConfig(TransformerConfig):
    """Settings of :class:`pibroch.models.SASRec`; of ``histories`` it has one, and no ``top``.

    Attributes:
        all_positions: learn from a sample which item follows each item of its sequence, not only
            which one follows the last; for the loss ``in_batch_softmax``.
    """

    name: Literal["sasrec"] = "sasrec"
    blocks: int = Field(default=2, ge=1, le=64)
    all_positions: bool = False


SPECS = (
    Spec("din", "attention of an item to a sequence", DINConfig, "pibroch.models.din:DIN"),
    Spec("bst", "a transformer and a deep network", BSTConfig, "pibroch.models.bst:BST"),
    Spec("sasrec", "self-attention", SASRecConfig, "pibroch.models.sasrec:SASRec"),
)
