"""pibroch: deep recommendation models whose embedding tables outgrow one machine."""

from pibroch import errors
from pibroch.data import JaggedBatch
from pibroch.embedding import (
    SGD,
    Adagrad,
    Adam,
    Normal,
    RowWiseAdagrad,
    RowWiseAdam,
    Table,
    Uniform,
    Zeros,
)
from pibroch.exchange import Embeddings
from pibroch.version import __version__

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Embeddings",
    "JaggedBatch",
    "Normal",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Table",
    "Uniform",
    "Zeros",
    "__version__",
    "errors",
]
