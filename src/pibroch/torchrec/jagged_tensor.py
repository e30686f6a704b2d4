"""Ragged ids and vectors with TorchRec's names.

Shape legend: F keys, B samples, V values in all, T positions of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from pibroch.errors import DataError
from pibroch.exchange.output import JaggedEmbeddings


class JaggedTensor:
    """A ragged tensor: values of each sample, one sample behind the other.

    Args:
        values: ``[V]`` or ``[V, D]``.
        weights: ``[V]``.
        lengths: whole numbers ``[B]``, values of each sample; or
        offsets: whole numbers ``[B + 1]``, where they begin and end.

    Raises:
        DataError: without lengths and offsets.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if lengths is None and offsets is None:
            raise DataError(f"a {type(self).__name__} without lengths and offsets", "one of them")
        self._values, self._weights, self._lengths, self._offsets = (
            values,
            weights,
            lengths,
            offsets,
        )

    def values(self) -> Tensor:
        """All values, ``[V]`` or ``[V, D]``."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Of the values, ``[V]``."""
        return self._weights

    def weights(self) -> Tensor:
        """Of the values, ``[V]``.

        Raises:
            DataError: when there are none.
        """
        if self._weights is None:
            raise DataError(
                f"weights() of a {type(self).__name__} without",
                "weights",
                "give them when it is made",
            )
        return self._weights

    def lengths(self) -> Tensor:
        """Values of each sample (and key), ``[B]`` (``[F * B]``)."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def offsets(self) -> Tensor:
        """Where they begin and end, one more than :meth:`lengths` has."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = torch.cat(
                [self._lengths.new_zeros(1), self._lengths.cumsum(0, dtype=self._lengths.dtype)]
            )
        return self._offsets

    def lengths_or_none(self) -> Tensor | None:
        """As :meth:`lengths`, which are always known."""
        return self.lengths()

    def offsets_or_none(self) -> Tensor | None:
        """As :meth:`offsets`, which are always known."""
        return self.offsets()

    def device(self) -> torch.device:
        """Where the values lie."""
        return self._values.device

    def to_dense(self) -> list[Tensor]:
        """The values of each sample."""
        return list(self._values.split(self.lengths().tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """As ``[B, T]`` or ``[B, T, D]``: the first T values of each sample, ``padding_value`` behind them.

        Args:
            desired_length: T; that of the longest sample when absent.
            padding_value: of places without a value.
        """
        lengths = self.lengths().long()
        longest = int(lengths.max()) if lengths.numel() else 0
        length = longest if desired_length is None else desired_length
        flat = self._values if self._values.ndim == 2 else self._values[:, None]
        if length < 1:
            return self._values.new_empty(len(lengths), 0, *self._values.shape[1:])
        ragged = JaggedEmbeddings(flat, self.offsets().long().cpu())
        padded = ragged.padded(length)
        if padding_value:
            padded = padded.masked_fill(~ragged.mask(length)[:, :, None], padding_value)
        return padded if self._values.ndim == 2 else padded.squeeze(2)


class KeyedJaggedTensor(JaggedTensor):
    """Ids of several features: the bags of ``keys[0]``, sample by sample, then those of ``keys[1]``, and so on.

    Args:
        keys: names of the F features.
        values: whole numbers ``[V]``.
        weights: float32 ``[V]``.
        lengths: whole numbers ``[F * B]``; or
        offsets: whole numbers ``[F * B + 1]``.

    Raises:
        DataError: without lengths and offsets, or with lengths that the keys cannot share evenly.

    Example:
        >>> ids = KeyedJaggedTensor(["a", "b"], torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 0, 1]))
        >>> ids.stride(), ids["a"].to_padded_dense(2).tolist(), ids["b"].values().tolist()
        (2, [[7, 8], [0, 0]], [9])
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        if not self._keys or self.lengths().numel() % len(self._keys):
            raise DataError(
                f"{self.lengths().numel()} lengths for {len(self._keys)} keys",
                "a length for each key and sample",
            )

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Of lengths."""
        return cls(keys, values, weights, lengths)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Of offsets."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> Self:
        """Of each key's ids; all have the same samples, and weights where one has."""
        parts = list(jt_dict.values())
        weights = (
            None
            if parts[0].weights_or_none() is None
            else torch.cat([part.weights() for part in parts])
        )
        lengths = torch.cat([part.lengths() for part in parts])
        return cls(list(jt_dict), torch.cat([part.values() for part in parts]), weights, lengths)

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> Self:
        """The keys of all, of the same samples."""
        return cls.from_jt_dict(
            {key: part for each in kjt_list for key, part in each.to_dict().items()}
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def stride(self) -> int:
        """Number of samples B."""
        return self.lengths().numel() // len(self._keys)

    def length_per_key(self) -> list[int]:
        """Values of each key."""
        return [int(total) for total in self.lengths().view(len(self._keys), -1).sum(1).tolist()]

    def offset_per_key(self) -> list[int]:
        """First value of each key, and the number of all values at the end."""
        return [0, *accumulate(self.length_per_key())]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each key's values."""
        counts, lengths = self.length_per_key(), self.lengths().view(len(self._keys), -1)
        values = self._values.split(counts)
        weights = [None] * len(counts) if self._weights is None else self._weights.split(counts)
        parts = zip(self._keys, values, weights, lengths, strict=True)
        return {key: JaggedTensor(value, weight, length) for key, value, weight, length in parts}

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(f"{key!r}; there are {', '.join(self._keys)}")
        return self.to_dict()[key]

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The keys at these places, in this order."""
        parts = self.to_dict()
        return KeyedJaggedTensor.from_jt_dict(
            {self._keys[index]: parts[self._keys[index]] for index in indices}
        )

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Cut into so many keys each."""
        ends = list(accumulate(segments))
        return [
            self.permute(range(end - count, end)) for count, end in zip(segments, ends, strict=True)
        ]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """On another device; itself where it lies there."""
        if self._values.device == torch.device(device):
            return self
        move = (self._values, self._weights, self.lengths())
        values, weights, lengths = (
            None if each is None else each.to(device, non_blocking=non_blocking) for each in move
        )
        assert values is not None
        return KeyedJaggedTensor(self._keys, values, weights, lengths)
