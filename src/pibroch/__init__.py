"""pibroch: deep recommendation models whose embedding tables outgrow one machine.

Names are loaded on first use: the command line answers at once, and can still set up torch's
threads before torch loads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pibroch import errors
from pibroch.errors import PibrochError
from pibroch.torch_backend import register
from pibroch.version import __version__

if TYPE_CHECKING:
    from pibroch import data, metrics, torchrec
    from pibroch.collectives import data_parallel
    from pibroch.collectives.bounded_lag.options import BoundedLagOptions
    from pibroch.data import JaggedBatch
    from pibroch.embedding import (
        SGD,
        Adagrad,
        Adam,
        AfterCount,
        Frozen,
        Hashed,
        LeastFrequent,
        LeastRecent,
        Normal,
        RowWiseAdagrad,
        RowWiseAdam,
        Table,
        Uniform,
        Zeros,
    )
    from pibroch.exchange import EmbeddingOutput, Embeddings
    from pibroch.exchange.alltoall.build import AllToAll
    from pibroch.exchange.base import Local
    from pibroch.exchange.lookahead.build import Lookahead
    from pibroch.exchange.retrieve.build import Retrieve
    from pibroch.exchange.towers.build import Towers
    from pibroch.planner import Plan
    from pibroch.serve import BoundedLagPipeline
    from pibroch.serve.predictor import Predictor
    from pibroch.train.program import load, save

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AfterCount",
    "AllToAll",
    "BoundedLagOptions",
    "BoundedLagPipeline",
    "EmbeddingOutput",
    "Embeddings",
    "Frozen",
    "Hashed",
    "JaggedBatch",
    "LeastFrequent",
    "LeastRecent",
    "Local",
    "Lookahead",
    "Normal",
    "PibrochError",
    "Plan",
    "Predictor",
    "Retrieve",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Table",
    "Towers",
    "Uniform",
    "Zeros",
    "__version__",
    "data",
    "data_parallel",
    "errors",
    "load",
    "metrics",
    "save",
    "torchrec",
]

_HOMES = {
    "AllToAll": "pibroch.exchange.alltoall.build",
    "BoundedLagOptions": "pibroch.collectives.bounded_lag.options",
    "BoundedLagPipeline": "pibroch.serve",
    "EmbeddingOutput": "pibroch.exchange",
    "Embeddings": "pibroch.exchange",
    "JaggedBatch": "pibroch.data",
    "Local": "pibroch.exchange.base",
    "Lookahead": "pibroch.exchange.lookahead.build",
    "Plan": "pibroch.planner",
    "Predictor": "pibroch.serve.predictor",
    "Retrieve": "pibroch.exchange.retrieve.build",
    "Towers": "pibroch.exchange.towers.build",
    "data_parallel": "pibroch.collectives",
    "load": "pibroch.train.program",
    "save": "pibroch.train.program",
}
_MODULES = ("data", "metrics", "torchrec")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"pibroch.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'pibroch' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "pibroch.embedding")), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register()
