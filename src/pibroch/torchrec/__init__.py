"""TorchRec's names over pibroch's exchanges.

A program written for TorchRec moves by changing its imports, and little else.

``docs/moving-from-torchrec.md`` says what changes. Nothing here imports TorchRec; its own
``KeyedJaggedTensor`` and table configurations are taken as well as those here.
"""

from pibroch.exchange.keyed_tensor import KeyedTensor
from pibroch.torchrec.configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from pibroch.torchrec.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from pibroch.torchrec.equality import jt_is_equal, kjt_is_equal
from pibroch.torchrec.form_modules import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    KTRegroupAsDict,
)
from pibroch.torchrec.jagged_tensor import JaggedTensor
from pibroch.torchrec.keyed_jagged_tensor import KeyedJaggedTensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "jt_is_equal",
    "kjt_is_equal",
]
