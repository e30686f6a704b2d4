"""TorchRec's modules that change the form of ids and embeddings, and have no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pibroch.errors import ConfigError
from pibroch.exchange.keyed_tensor import KeyedTensor, check_groups
from pibroch.torchrec.jagged_tensor import JaggedTensor
from pibroch.torchrec.keyed_jagged_tensor import KeyedJaggedTensor

_FLOATS = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


class ComputeKJTToJTDict(nn.Module):
    """:meth:`KeyedJaggedTensor.to_dict` as a module."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Each key's values."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """:meth:`KeyedJaggedTensor.from_jt_dict` as a module."""

    def forward(self, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Ids of all keys."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


class KTRegroupAsDict(nn.Module):
    """:meth:`KeyedTensor.regroup_as_dict` as a module.

    Args:
        groups: for each group its keys.
        keys: a name for each group.
        emb_dtype: ``DataType`` of the results, floating point; by default as they come.
        multi_device: nothing here needs it: the module keeps no tensors.

    Raises:
        ConfigError: for another number of names than of groups, and another type.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: Any = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        check_groups(groups, keys)
        self._groups = groups
        self._keys = keys
        if emb_dtype is not None and emb_dtype.value not in _FLOATS:
            raise ConfigError(f"emb_dtype={emb_dtype}", f"a DataType among {', '.join(_FLOATS)}")
        self._dtype = None if emb_dtype is None else _FLOATS[emb_dtype.value]

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """For each name the parts of its group side by side."""
        groups = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        return {name: group.to(self._dtype) for name, group in groups.items()}
