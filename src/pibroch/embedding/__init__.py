"""Tables, their row spaces, records and optimizers."""

from pibroch.embedding.groups import (
    Optimizers,
    TableGroup,
    group_tables,
    names_of_readers,
    optimizers_of,
)
from pibroch.embedding.initializers import Initializer, Normal, Uniform, Zeros
from pibroch.embedding.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Frozen,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseOptimizer,
)
from pibroch.embedding.piece import Piece, PieceView, RowArray, Shard
from pibroch.embedding.row_index import Identity, IndexKind, RowIndex
from pibroch.embedding.row_space import RowSpace
from pibroch.embedding.shard import MemoryShard
from pibroch.embedding.table import Table

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Frozen",
    "Identity",
    "IndexKind",
    "Initializer",
    "MemoryShard",
    "Normal",
    "Optimizers",
    "Piece",
    "PieceView",
    "RowArray",
    "RowIndex",
    "RowSpace",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Shard",
    "SparseOptimizer",
    "Table",
    "TableGroup",
    "Uniform",
    "Zeros",
    "group_tables",
    "names_of_readers",
    "optimizers_of",
]
