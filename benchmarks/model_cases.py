"""One training run of a model, in pibroch and in FuxiCTR alike.

Imported by workers in environments that have no pibroch, so it needs Python alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

CROSS_LAYERS = 3
GATE_HIDDEN = (64,)
ATTENTION_HIDDEN = (64,)
DATASET = "samples"
"""What FuxiCTR calls the data."""
SCORES = "scores"
TABLE = "table "
LAYER = "layer "
"""Trained weights as arrays: scores of the test split, tables by feature, layers by number."""


@dataclass(frozen=True, slots=True)
class ModelCase:
    """What both sides are told.

    Attributes:
        model: ``dcnv2``, ``deepfm``, ``finalmlp``, ``finalnet`` or ``din``.
        optimizer: of layers and embeddings alike, ``adam`` or ``adagrad``.
        lr: its learning rate, a tenth of it after each epoch that brought no better AUC on the
            validation split.
        seed: of weights and order.
        epochs: at most; training ends after ``patience`` in a row without a better AUC, and the
            best epoch's model is tested.
        patience: see there.
        batch_size: samples a step.
        dim: D.
        top: hidden widths of the deep network, of both streams or of both blocks.
        initial_std: of embeddings, normal; layers begin as torch's own do.
    """

    model: str
    optimizer: str = "adam"
    lr: float = 1e-3
    seed: int = 1
    epochs: int = 10
    patience: int = 2
    batch_size: int = 4096
    dim: int = 16
    top: tuple[int, ...] = (400, 400, 400)
    initial_std: float = 1e-4

    def to_json(self) -> str:
        """The case as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelCase:
        """Read what :meth:`to_json` gave."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields | {"top": tuple(fields["top"])})
