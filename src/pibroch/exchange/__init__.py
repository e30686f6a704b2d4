"""The Embeddings module and the strategies behind it, which load when they are chosen."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pibroch.exchange.base import Exchange
    from pibroch.exchange.embeddings import Embeddings
    from pibroch.exchange.output import EmbeddingOutput
    from pibroch.exchange.towers.modules import place_towers

__all__ = ["EmbeddingOutput", "Embeddings", "Exchange", "place_towers"]
_HOMES = {
    "EmbeddingOutput": "pibroch.exchange.output",
    "Embeddings": "pibroch.exchange.embeddings",
    "Exchange": "pibroch.exchange.base",
    "place_towers": "pibroch.exchange.towers.modules",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pibroch.exchange' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
