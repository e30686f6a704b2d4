"""Tables, their row space, records and optimizers."""

from pibroch.embedding.initializers import Initializer, Normal, Uniform, Zeros
from pibroch.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam, SparseOptimizer
from pibroch.embedding.piece import Piece, PieceView, RowArray, Shard
from pibroch.embedding.row_space import RowSpace
from pibroch.embedding.shard import MemoryShard
from pibroch.embedding.table import Table

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Initializer",
    "MemoryShard",
    "Normal",
    "Piece",
    "PieceView",
    "RowArray",
    "RowSpace",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Shard",
    "SparseOptimizer",
    "Table",
    "Uniform",
    "Zeros",
]
