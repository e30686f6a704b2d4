"""One training of a model that names items, in pibroch and in RecBole alike.

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
        model: ``sasrec``, or ``two_tower`` of users and items by their ids.
        seed: of weights and order.
        dim: D, also of hidden layers and of a tower's vector.
        max_length: T, items of a history; of ``sasrec``, as the next two.
        blocks: of self-attention.
        heads: of each.
        dropout: behind each layer, of attention's weights, and in RecBole of embeddings.
        lr: of Adam.
        pairs: of a user or a history and an item, a step.
        epochs: at most; training ends after ``patience`` in a row without a better NDCG on the
            validation items, and the best epoch's model is tested.
        patience: see there.
    """

    model: str = "sasrec"
    seed: int = 1
    dim: int = 64
    max_length: int = 20
    blocks: int = 1
    heads: int = 1
    dropout: float = 0.2
    lr: float = 1e-3
    pairs: int = 2048
    epochs: int = 200
    patience: int = 5

    def to_json(self) -> str:
        """The case as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NextItemCase:
        """Read what :meth:`to_json` gave."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)
