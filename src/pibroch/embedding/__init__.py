"""Tables, their row spaces, records and optimizers."""

from pibroch.embedding.admission import AfterCount
from pibroch.embedding.eviction import EvictionPolicy, LeastFrequent, LeastRecent
from pibroch.embedding.groups import (
    Optimizers,
    TableGroup,
    group_tables,
    names_of_readers,
    optimizers_of,
)
from pibroch.embedding.hashed import Hashed
from pibroch.embedding.hashed_index import HashedIndex
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
from pibroch.embedding.row_index import Identity, IndexKind, LearningIndex, RowChanges, RowIndex
from pibroch.embedding.row_space import RowSpace
from pibroch.embedding.shard import MemoryShard
from pibroch.embedding.table import Table, features_of

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AfterCount",
    "EvictionPolicy",
    "Frozen",
    "Hashed",
    "HashedIndex",
    "Identity",
    "IndexKind",
    "Initializer",
    "LearningIndex",
    "LeastFrequent",
    "LeastRecent",
    "MemoryShard",
    "Normal",
    "Optimizers",
    "Piece",
    "PieceView",
    "RowArray",
    "RowChanges",
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
    "features_of",
    "group_tables",
    "names_of_readers",
    "optimizers_of",
]
