"""One training of SASRec, in pibroch and in RecBole alike.

Imported by workers in environments that have no pibroch, so it needs Python alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

DATASET = "events"
"""What RecBole calls the data."""
TOP = 10
"""Of how many items the next one should be one."""


@dataclass(frozen=True, slots=True)
class NextItemCase:
    """What both sides are told.

    Attributes:
        seed: of weights and order.
        dim: D, also of the hidden layer behind attention.
        max_length: T, items of a history.
        blocks: of self-attention.
        heads: of each.
        dropout: of embeddings in RecBole, of attention's weights and behind each layer in both.
        lr: of Adam.
        pairs: of a history and what follows it, a step.
        epochs: at most; training ends after ``patience`` in a row without a better NDCG on the
            validation items, and the best epoch's model is tested.
        patience: see there.
    """

    seed: int = 1
    dim: int = 64
    max_length: int = 20
    blocks: int = 1
    heads: int = 1
    dropout: float = 0.2
    lr: float = 1e-3
    pairs: int = 2048
    epochs: int = 200
    patience: int = 10

    def to_json(self) -> str:
        """The case as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NextItemCase:
        """Read what :meth:`to_json` gave."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)
