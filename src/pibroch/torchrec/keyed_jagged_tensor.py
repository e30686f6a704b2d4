"""Ragged ids of several features with TorchRec's names.

Shape legend: F keys, B samples, B_k samples of key k, V values in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pibroch.errors import DataError
from pibroch.torchrec.jagged_tensor import JaggedTensor, no_values
from pibroch.torchrec.key_samples import KeySamples

_CACHED = ("stride_per_key", "lengths_offset_per_key", "offset_per_key", "index_per_key", "jt_dict")


class _Part(NamedTuple):
    """Some keys, the samples of each by rank, and their values."""

    keys: Sequence[str]
    by_rank: Sequence[list[int]]
    tensor: JaggedTensor


class KeyedJaggedTensor(JaggedTensor):
    """Ids of several features.

    First the bags of ``keys[0]``, sample by sample, then those of ``keys[1]``, and so on. A key may
    be there twice, as :meth:`permute` and :meth:`concat` make it. Then it is reached by its place,
    and what goes by names says so.

    Keys may differ in their number of samples (``stride_per_key_per_rank``). Such ids can be cut,
    joined and taken apart; embedding collections refuse them.

    Args:
        keys: names of the F features.
        values: whole numbers ``[V]``.
        weights: float32 ``[V]``.
        lengths: whole numbers ``[F * B]``; or
        offsets: whole numbers ``[F * B + 1]``.
        stride: number of samples B, which nothing else says where there are no keys.
        stride_per_key_per_rank: for each key its number of samples, by rank, whose sum is B_k.
        length_per_key: values of each key, where they are known; not compared with the lengths.
        inverse_indices: refused.
        **derived: what TorchRec caches and nothing here needs: ``stride_per_key``,
            ``lengths_offset_per_key``, ``offset_per_key``, ``index_per_key``, ``jt_dict``.

    Raises:
        DataError: as for :class:`JaggedTensor`, and for lengths that the keys cannot share.

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
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        *,
        length_per_key: Sequence[int] | None = None,
        inverse_indices: object = None,
        **derived: object,
    ) -> None:
        unknown = derived.keys() - set(_CACHED)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {min(unknown)!r}")
        if inverse_indices is not None:
            raise DataError(
                f"inverse indices of a {type(self).__name__}",
                "the ids of each sample",
                "give samples that repeat their ids again, and leave inverse_indices out",
            )
        if not keys and lengths is None and offsets is None:
            lengths = torch.empty(0, dtype=torch.int32, device=values.device)
        # as a view ``[F * B]``, also of ``[F, B]``
        super().__init__(values, weights, None if lengths is None else lengths.flatten(), offsets)
        self._keys = list(keys)
        self._samples = KeySamples.of(
            len(self._keys), self.lengths().numel(), stride, stride_per_key_per_rank
        )
        self._length_per_key = None if length_per_key is None else list(length_per_key)
        if length_per_key is not None and (
            len(length_per_key) != len(self._keys) or sum(length_per_key) != len(values)
        ):
            raise DataError(
                f"length_per_key={list(length_per_key)} of {len(self._keys)} keys and"
                f" {len(values)} values",
                "the number of values of each key",
                "leave it out: it is computed",
            )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """Without keys and samples."""
        return KeyedJaggedTensor(
            [], *no_values(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Without keys, of the same number of samples, types and device."""
        return kjt.permute([])

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: object = None,
    ) -> Self:
        """Of lengths."""
        return cls(
            keys,
            values,
            weights,
            lengths,
            None,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        )

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: object = None,
    ) -> Self:
        """Of offsets."""
        return cls(
            keys,
            values,
            weights,
            None,
            offsets,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        )

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> Self:
        """Of each key's ids; all with weights, or none.

        Keys of different numbers of samples become a batch size for each key.

        Raises:
            DataError: where only some have weights, or there are no keys.
        """
        parts = [_Part([key], [[len(jt.lengths())]], jt) for key, jt in jt_dict.items()]
        return cls._joined(parts, len({str(part.by_rank) for part in parts}) > 1)

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> Self:
        """The keys of all; all with weights, or none.

        Raises:
            DataError: where that is not so, there is none, or they are of different numbers of
                samples without a batch size for each key.
        """
        varies = any(each.variable_stride_per_key() for each in kjt_list)
        strides = [each.stride() for each in kjt_list]
        if not varies and len(set(strides)) > 1:
            raise DataError(
                f"ids of keys {[each.keys() for each in kjt_list]} of {strides} samples",
                "the same samples for each key",
                "give samples without ids of a key the length 0",
            )
        parts = [_Part(each.keys(), each._samples.by_rank, each) for each in kjt_list]
        return cls._joined(parts, varies, None if varies or not strides else strides[0])

    @classmethod
    def _joined(cls, parts: Sequence[_Part], varies: bool, stride: int | None = None) -> Self:
        if not parts:
            raise DataError("nothing to make ids of several features of", "at least one part")
        tensors = [part.tensor for part in parts]
        weights = [tensor.weights_or_none() for tensor in tensors]
        having = [each for each in weights if each is not None]
        if 0 < len(having) < len(parts):
            without = next(
                ", ".join(part.keys) for part, w in zip(parts, weights, strict=True) if w is None
            )
            raise DataError(
                f"ids of which some have weights and some do not ({without})",
                "weights for all, or none",
                "give the others weights of 1",
            )
        return cls(
            [key for part in parts for key in part.keys],
            torch.cat([tensor.values() for tensor in tensors]),
            torch.cat(having) if having else None,
            torch.cat([tensor.lengths() for tensor in tensors]),
            None,
            stride,
            [each for part in parts for each in part.by_rank] if varies else None,
        )

    def sync(self) -> Self:
        """Add up the lengths of each key now, which waits for the device where they lie there.

        Raises:
            DataError: as :meth:`length_per_key`.
        """
        self.length_per_key()
        return self

    def unsync(self) -> Self:
        """Forget these sums."""
        self._length_per_key = None
        return self

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def stride(self) -> int:
        """Number of samples B; the largest one where keys differ, also of a part of them."""
        return self._samples.stride

    def stride_per_key(self) -> list[int]:
        """Number of samples of each key."""
        return self._samples.per_key()

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """The same by rank, as it was given; empty where all keys have one number."""
        return self._samples.given() or []

    def variable_stride_per_key(self) -> bool:
        """Whether each key has a number of samples of its own."""
        return self._samples.varies

    def inverse_indices_or_none(self) -> None:
        """``None``: there are none."""

    def length_per_key(self) -> list[int]:
        """Values of each key.

        On the ``meta`` device, where lengths have no numbers, each has its even share.

        Raises:
            DataError: when they are not as many as there are values.
        """
        if self._length_per_key is None:
            self._length_per_key = self._even_shares() if self._values.is_meta else self._sums()
        return self._length_per_key

    def _even_shares(self) -> list[int]:
        share, rest = divmod(len(self._values), max(1, len(self._keys)))
        return [share + rest * (place == 0) for place in range(len(self._keys))]

    def _sums(self) -> list[int]:
        if self._samples.varies:
            parts = self.lengths().split(self.stride_per_key())
            counts = torch.stack([part.sum() for part in parts]).tolist() if self._keys else []
        else:
            counts = self.lengths().view(len(self._keys), self._samples.stride).sum(1).tolist()
        if sum(counts) != len(self._values):
            raise DataError(
                f"lengths of {sum(counts)} values in all", f"as many as values, {len(self._values)}"
            )
        return counts

    def length_per_key_or_none(self) -> list[int] | None:
        """As :meth:`length_per_key` where they were added up already."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """First value of each key, and the number of all values at the end."""
        return [0, *accumulate(self.length_per_key())]

    def offset_per_key_or_none(self) -> list[int] | None:
        """As :meth:`offset_per_key` where lengths were added up already."""
        return None if self._length_per_key is None else self.offset_per_key()

    def lengths_offset_per_key(self) -> list[int]:
        """First length of each key, and the number of all lengths at the end."""
        return [0, *accumulate(self.stride_per_key())]

    def index_per_key(self) -> dict[str, int]:
        """Each key's place; the last one of a key that is there twice."""
        return {key: place for place, key in enumerate(self._keys)}

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
        samples = self._samples
        taken = [_Part([self._keys[i]], [samples.by_rank[i]], parts[i]) for i in indices]
        return self._joined(taken, samples.varies, samples.stride)

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

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Itself: lengths have one dimension here, also where they were given as ``[F, B]``."""
        return self

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
        values, weights, lengths = self._changed(
            lambda tensor: tensor.to(device, non_blocking=non_blocking)
        )
        return self._like(
            values, weights if weights is None or dtype is None else weights.to(dtype), lengths
        )

    def pin_memory(self) -> KeyedJaggedTensor:
        """A copy in pinned memory, which a ``DataLoader`` with ``pin_memory=True`` asks for."""
        return self._like(*self._changed(Tensor.pin_memory))

    def _like(self, values: Tensor, weights: Tensor | None, lengths: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            self._keys,
            values,
            weights,
            lengths,
            None,
            self._samples.stride,
            self._samples.given(),
            length_per_key=self._length_per_key,
        )

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
        lengths = self.lengths().split(self.stride_per_key()) if self._keys else ()
        values = self._values.split(counts) if self._keys else ()
        weights = [None] * len(counts) if self._weights is None else self._weights.split(counts)
        return [JaggedTensor(*each) for each in zip(values, weights, lengths, strict=True)]

    def _without_keys(self) -> KeyedJaggedTensor:
        weights = None if self._weights is None else self._weights[:0]
        return KeyedJaggedTensor(
            [],
            self._values[:0],
            weights,
            self.lengths()[:0],
            None,
            self._samples.stride,
            [] if self._samples.varies else None,
        )

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedJaggedTensor()\n"
        shown = [
            f'    "{key}": {_shown(part)}'
            for key, part in zip(self._keys, self._parts(), strict=True)
        ]
        return "KeyedJaggedTensor({\n" + ",\n".join(shown) + "\n})\n"


def _shown(part: JaggedTensor) -> str:
    values, weights = (
        None if bags is None else [bag.tolist() for bag in bags]
        for bags in (part.to_dense(), part.to_dense_weights())
    )
    if weights is None:
        return str(values)
    return f'{{\n        "values": {values},\n        "weights": {weights}\n    }}'
