"""The Embeddings module and the strategies behind it."""

from pibroch.exchange.base import Exchange
from pibroch.exchange.embeddings import Embeddings

__all__ = ["Embeddings", "Exchange"]
