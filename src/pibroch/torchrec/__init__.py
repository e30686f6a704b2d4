"""TorchRec's names over pibroch's exchanges.

A program written for TorchRec moves by changing its imports, and little else.

``docs/moving-from-torchrec.md`` says what changes. Nothing here imports TorchRec; its own
``KeyedJaggedTensor`` and table configurations are taken as well as those here.
"""

from pibroch.exchange.keyed_tensor import KeyedTensor
from pibroch.torchrec.configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from pibroch.torchrec.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from pibroch.torchrec.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
]
