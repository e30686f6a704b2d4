"""From raw click logs to minibatches. Names load on first use: streams need polars."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pibroch.data.batch import JaggedBatch, LoaderPosition
    from pibroch.data.dataset import EncodedDataset, Split
    from pibroch.data.loader import Loader
    from pibroch.data.schema import CategoricalFeature, DenseFeature, Schema
    from pibroch.data.streams.program import stream

__all__ = [
    "CategoricalFeature",
    "DenseFeature",
    "EncodedDataset",
    "JaggedBatch",
    "Loader",
    "LoaderPosition",
    "Schema",
    "Split",
    "stream",
]
_HOMES = {
    "CategoricalFeature": "pibroch.data.schema",
    "DenseFeature": "pibroch.data.schema",
    "EncodedDataset": "pibroch.data.dataset",
    "JaggedBatch": "pibroch.data.batch",
    "Loader": "pibroch.data.loader",
    "LoaderPosition": "pibroch.data.batch",
    "Schema": "pibroch.data.schema",
    "Split": "pibroch.data.dataset",
    "stream": "pibroch.data.streams.program",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pibroch.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
