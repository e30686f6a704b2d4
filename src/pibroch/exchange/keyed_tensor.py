"""Embeddings side by side in one tensor, with TorchRec's methods.

Shape legend: B samples, D_k width of key k's embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pibroch.errors import ConfigError


class KeyedTensor:
    """Named parts of one tensor, with the methods of TorchRec's ``KeyedTensor``.

    Args:
        keys: names of the parts; in one tensor each once.
        length_per_key: their widths D_k.
        values: ``[B, sum of D_k]``.

    Raises:
        ConfigError: when these do not fit together.

    Example:
        >>> user = KeyedTensor(["age", "city"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> item = KeyedTensor(["price"], [1], torch.tensor([[4.0]]))
        >>> groups = KeyedTensor.regroup([user, item], [["price", "age"], ["city"]])
        >>> [group.tolist() for group in groups]
        [[[4.0, 1.0]], [[2.0, 3.0]]]
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._lengths = list(length_per_key)
        self._values = values
        if (
            len(self._keys) != len(self._lengths)
            or values.ndim != 2
            or sum(self._lengths) != values.shape[1]
        ):
            raise ConfigError(
                f"values {list(values.shape)} for {len(self._keys)} keys of widths {self._lengths}",
                "[B, sum of the widths], a width for each key",
            )

    @classmethod
    def from_tensor_list(cls, keys: Sequence[str], tensors: Sequence[Tensor]) -> KeyedTensor:
        """Join a tensor ``[B, D_k]`` for each key."""
        return cls(keys, [tensor.shape[1] for tensor in tensors], torch.cat(list(tensors), 1))

    def keys(self) -> list[str]:
        """Names of the parts."""
        return self._keys

    def length_per_key(self) -> list[int]:
        """Width of each part."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """First column of each part, and the number of all columns at the end."""
        return [0, *accumulate(self._lengths)]

    def values(self) -> Tensor:
        """All parts, ``[B, sum of D_k]``."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which the parts lie: 1."""
        return 1

    def device(self) -> torch.device:
        """Where the values lie."""
        return self._values.device

    def to_dict(self) -> dict[str, Tensor]:
        """Each part ``[B, D_k]`` by its name.

        Take it once rather than parts one by one, so that gradients join once.
        """
        return dict(zip(self._keys, self._values.split(self._lengths, 1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(f"{key!r}; there are {', '.join(self._keys)}")
        place = self._keys.index(key)
        return self._values.narrow(1, sum(self._lengths[:place]), self._lengths[place])

    def _key_indices(self) -> dict[str, int]:
        """Each key's place; TorchRec's own ``KeyedTensor.regroup`` asks for it."""
        return {key: place for place, key in enumerate(self._keys)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """A copy on another device, through which gradients flow back."""
        return KeyedTensor(
            self._keys, self._lengths, self._values.to(device, non_blocking=non_blocking)
        )

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """For each group of keys their parts side by side, ``[B, sum of D_k]``.

        Of a key that is in several tensors the last one counts.

        Raises:
            ConfigError: for a key that is in none of them.
        """
        parts = {key: part for each in keyed_tensors for key, part in each.to_dict().items()}
        for key in (key for group in groups for key in group):
            if key not in parts:
                raise ConfigError(f"key {key!r} in a group", f"one of {', '.join(parts)}")
        return [torch.cat([parts[key] for key in group], 1) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """As :meth:`regroup`, with a name for each group."""
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))
