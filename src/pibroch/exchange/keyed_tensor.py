"""Embeddings side by side in one tensor, with TorchRec's methods.

Shape legend: B samples, K key dimension, D_k width of key k's embeddings along it.
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
        values: ``[B, sum of D_k]``; of other dimensions with another ``key_dim``.
        key_dim: the dimension K along which the parts lie.

    Raises:
        ConfigError: when these do not fit together.

    Example:
        >>> user = KeyedTensor(["age", "city"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> item = KeyedTensor(["price"], [1], torch.tensor([[4.0]]))
        >>> groups = KeyedTensor.regroup([user, item], [["price", "age"], ["city"]])
        >>> [group.tolist() for group in groups]
        [[[4.0, 1.0]], [[2.0, 3.0]]]
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1
    ) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim
        width = values.shape[key_dim] if 0 <= key_dim < values.ndim else None
        nothing = not self._keys and not values.numel()  # as TorchRec writes "no keys"
        if len(self._keys) != len(self._length_per_key) or (
            sum(self._length_per_key) != width and not nothing
        ):
            raise ConfigError(
                f"values {list(values.shape)} for {len(self._keys)} keys of widths"
                f" {self._length_per_key}",
                f"[B, sum of the widths], a width for each key, with key_dim={key_dim}",
            )

    @classmethod
    def from_tensor_list(
        cls, keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Join a tensor ``[B, D_k]`` for each key, along ``cat_dim``.

        Raises:
            ConfigError: for another ``cat_dim`` than ``key_dim`` where there are several tensors.
        """
        widths = [tensor.shape[key_dim] for tensor in tensors]
        return cls(keys, widths, torch.cat(list(tensors), cat_dim), key_dim)

    def keys(self) -> list[str]:
        """Names of the parts."""
        return self._keys

    def length_per_key(self) -> list[int]:
        """Width of each part."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """First column of each part, and the number of all columns at the end."""
        return [0, *accumulate(self._length_per_key)]

    def values(self) -> Tensor:
        """All parts, ``[B, sum of D_k]``."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which the parts lie; 1 in what comes out of lookups."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the values lie."""
        return self._values.device

    def to_dict(self) -> dict[str, Tensor]:
        """Each part ``[B, D_k]`` by its name.

        Take it once rather than parts one by one, so that gradients join once.
        """
        if not self._keys:
            return {}
        parts = self._values.split(self._length_per_key, self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(f"{key!r}; there are {', '.join(self._keys)}")
        place = self._key_indices()[key]
        begin = sum(self._length_per_key[:place])
        return self._values.narrow(self._key_dim, begin, self._length_per_key[place])

    def _key_indices(self) -> dict[str, int]:
        """Each key's place; TorchRec's own ``KeyedTensor.regroup`` asks for it."""
        return {key: place for place, key in enumerate(self._keys)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """A copy on another device, through which gradients flow back."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until what the stream does now is done, as ``Tensor.record_stream``."""
        self._values.record_stream(stream)

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """For each group of keys their parts side by side, ``[B, sum of D_k]``.

        Of a key that is in several tensors the last one counts.

        Raises:
            ConfigError: for no tensors, tensors of several key dimensions, and a key that is in
                none of them.
        """
        dims = sorted({each.key_dim() for each in keyed_tensors})
        if len(dims) != 1:
            raise ConfigError(
                f"{len(keyed_tensors)} tensors of key dimensions {dims} to regroup",
                "at least one, of one key dimension",
            )
        parts = {key: part for each in keyed_tensors for key, part in each.to_dict().items()}
        for key in (key for group in groups for key in group):
            if key not in parts:
                raise ConfigError(f"key {key!r} in a group", f"one of {', '.join(parts)}")
        nothing = keyed_tensors[0].values().narrow(dims[0], 0, 0)
        return [
            torch.cat([parts[key] for key in group], dims[0]) if group else nothing
            for group in groups
        ]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """As :meth:`regroup`, with a name for each group.

        Raises:
            ConfigError: as there, and for another number of names than of groups.
        """
        check_groups(groups, keys)
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedTensor()\n"
        shown = [f'    "{key}": {self[key].tolist()}' for key in self._keys]
        return "KeyedTensor({\n" + ",\n".join(shown) + "\n})\n"


def check_groups(groups: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Raise unless each group has a name.

    Raises:
        ConfigError: for another number of names than of groups.
    """
    if len(groups) != len(names):
        raise ConfigError(f"{len(groups)} groups with {len(names)} names", "a name for each group")
