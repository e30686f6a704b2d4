"""Ragged ids and vectors with TorchRec's names.

Shape legend: F keys, B samples, V values in all, T positions of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
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
        DataError: without lengths and offsets, for such that are no whole numbers, and for another
            number of weights than of values.
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
        for name, tensor in (("lengths", lengths), ("offsets", offsets)):
            if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                raise DataError(f"{name} of type {tensor.dtype}", "whole numbers", "call .long()")
        if weights is not None and len(weights) != len(values):
            raise DataError(f"{len(weights)} weights of {len(values)} values", "one of each value")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

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
        """As :meth:`lengths`, which are always there."""
        return self.lengths()

    def offsets_or_none(self) -> Tensor | None:
        """As :meth:`offsets`, which are always there."""
        return self.offsets()

    def device(self) -> torch.device:
        """Where the values lie."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """On another device; itself where it lies there."""
        if self._values.device == torch.device(device):
            return self
        return JaggedTensor(*self._moved(device, non_blocking))

    def _moved(
        self, device: torch.device | str, non_blocking: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        values, lengths = (
            each.to(device, non_blocking=non_blocking) for each in (self._values, self.lengths())
        )
        weights = self._weights
        moved = None if weights is None else weights.to(device, non_blocking=non_blocking)
        return values, moved, lengths

    def to_dense(self) -> list[Tensor]:
        """The values of each sample."""
        return [self._values[begin:end] for begin, end in pairwise(self.offsets().tolist())]

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """The values as ``[B, T]`` or ``[B, T, D]``.

        The first T values of each sample, ``padding_value`` behind them.

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
    """Ids of several features.

    First the bags of ``keys[0]``, sample by sample, then those of ``keys[1]``, and so on. A key may
    be there twice, as :meth:`permute` and :meth:`concat` make it. Then it is reached by its place,
    and what goes by names says so.

    Args:
        keys: names of the F features.
        values: whole numbers ``[V]``.
        weights: float32 ``[V]``.
        lengths: whole numbers ``[F * B]``; or
        offsets: whole numbers ``[F * B + 1]``.
        stride: number of samples B, which nothing else says where there are no keys.

    Raises:
        DataError: as for :class:`JaggedTensor`, and for lengths that the keys cannot share evenly.

    Example:
        >>> lengths = torch.tensor([2, 0, 0, 1])
        >>> ids = KeyedJaggedTensor(["a", "b"], torch.tensor([7, 8, 9]), lengths=lengths)
        >>> ids.stride(), ids["a"].to_padded_dense(2).tolist(), ids["b"].values().tolist()
        (2, [[7, 8], [0, 0]], [9])
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        count = self.lengths().numel()
        self._stride = count // max(1, len(self._keys)) if stride is None else stride
        if self._stride * len(self._keys) != count:
            samples = "" if stride is None else f" and {stride} samples"
            raise DataError(
                f"{count} lengths for {len(self._keys)} keys{samples}",
                "a length for each key and sample",
            )

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> Self:
        """Of lengths."""
        return cls(keys, values, weights, lengths, stride=stride)

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> Self:
        """Of offsets."""
        return cls(keys, values, weights, offsets=offsets, stride=stride)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> Self:
        """Of each key's ids, of the same samples; all with weights, or none.

        Raises:
            DataError: where that is not so, or there are no keys.
        """
        return cls._joined([([key], len(jt.lengths()), jt) for key, jt in jt_dict.items()])

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> Self:
        """The keys of all, of the same samples; all with weights, or none.

        Raises:
            DataError: where that is not so, or there is none.
        """
        return cls._joined([(each.keys(), each.stride(), each) for each in kjt_list])

    @classmethod
    def _joined(cls, parts: Sequence[tuple[Sequence[str], int, JaggedTensor]]) -> Self:
        if not parts:
            raise DataError("nothing to make ids of several features of", "at least one part")
        strides = [stride for _, stride, _ in parts]
        if len(set(strides)) > 1:
            raise DataError(
                f"ids of keys {[list(keys) for keys, *_ in parts]} of {strides} samples",
                "the same samples for each key",
                "give samples without ids of a key the length 0",
            )
        tensors = [tensor for *_, tensor in parts]
        weights = [tensor.weights_or_none() for tensor in tensors]
        having = [each for each in weights if each is not None]
        if 0 < len(having) < len(parts):
            without = next(
                ", ".join(part[0]) for part, w in zip(parts, weights, strict=True) if w is None
            )
            raise DataError(
                f"ids of which some have weights and some do not ({without})",
                "weights for all, or none",
                "give the others weights of 1",
            )
        return cls(
            [key for keys, *_ in parts for key in keys],
            torch.cat([tensor.values() for tensor in tensors]),
            torch.cat(having) if having else None,
            torch.cat([tensor.lengths() for tensor in tensors]),
            stride=parts[0][1],
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def stride(self) -> int:
        """Number of samples B."""
        return self._stride

    def length_per_key(self) -> list[int]:
        """Values of each key.

        Raises:
            DataError: when they are not as many as there are values.
        """
        counts = self.lengths().view(len(self._keys), self._stride).sum(1).tolist()
        if sum(counts) != len(self._values):
            raise DataError(
                f"lengths of {sum(counts)} values in all", f"as many as values, {len(self._values)}"
            )
        return counts

    def offset_per_key(self) -> list[int]:
        """First value of each key, and the number of all values at the end."""
        return [0, *accumulate(self.length_per_key())]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each key's values.

        Raises:
            DataError: for a key that is there twice.
        """
        for key in self._keys:
            self._place(key)
        return dict(zip(self._keys, self._parts(), strict=True))

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(f"{key!r}; there are {', '.join(self._keys)}")
        return self._parts()[self._place(key)]

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """The keys at these places, in this order; one may come several times, or not at all.

        Args:
            indices: of the keys.
            indices_tensor: the same, which nothing here needs.

        Raises:
            DataError: for a place where there is no key.
        """
        wrong = [index for index in indices if not 0 <= index < len(self._keys)]
        if wrong:
            raise DataError(
                f"key {wrong[0]} of {len(self._keys)}", "a place among the keys, from 0"
            )
        if not indices:
            return self._without_keys()
        parts = self._parts()
        return self._joined(
            [([self._keys[index]], self._stride, parts[index]) for index in indices]
        )

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Cut into so many keys each, none included; keys behind them are left out.

        Raises:
            DataError: for more keys than there are, or fewer than none.
        """
        if any(count < 0 for count in segments) or sum(segments) > len(self._keys):
            raise DataError(
                f"{len(self._keys)} keys to be split into {list(segments)}", "as many at most"
            )
        ends = list(accumulate(segments))
        return [
            self.permute(range(end - count, end)) for count, end in zip(segments, ends, strict=True)
        ]

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """On another device, and with weights of another type; itself where that is so already."""
        is_typed = dtype is None or self._weights is None or self._weights.dtype == dtype
        if self._values.device == torch.device(device) and is_typed:
            return self
        values, weights, lengths = self._moved(device, non_blocking)
        weights = weights if weights is None or dtype is None else weights.to(dtype)
        return KeyedJaggedTensor(self._keys, values, weights, lengths, stride=self._stride)

    def _place(self, key: str) -> int:
        if self._keys.count(key) > 1:
            raise DataError(
                f"key {key!r}, which is there {self._keys.count(key)} times",
                "keys of different names",
                "take it by its place: permute([place])",
            )
        return self._keys.index(key)

    def _parts(self) -> list[JaggedTensor]:
        """Those of each key, in their order."""
        counts = self.length_per_key()
        lengths = self.lengths().view(len(self._keys), self._stride)
        values = self._values.split(counts)
        weights = [None] * len(counts) if self._weights is None else self._weights.split(counts)
        return [JaggedTensor(*each) for each in zip(values, weights, lengths, strict=True)]

    def _without_keys(self) -> KeyedJaggedTensor:
        weights = None if self._weights is None else self._weights[:0]
        return KeyedJaggedTensor(
            [], self._values[:0], weights, self.lengths()[:0], stride=self._stride
        )
