"""Ragged values with TorchRec's names.

Shape legend: B samples, V values in all, T positions of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

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
        lengths = _whole_numbers("lengths", lengths)
        offsets = _whole_numbers("offsets", offsets)
        if offsets is not None and not offsets.numel():  # as TorchRec writes "no samples"
            lengths = offsets if lengths is None else lengths
            offsets = None
        if weights is not None and len(weights) != len(values):
            raise DataError(f"{len(weights)} weights of {len(values)} values", "one of each value")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """Without samples."""
        return JaggedTensor(
            *no_values(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        )

    @staticmethod
    def from_dense(
        values: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> JaggedTensor:
        """Join the values of each sample, and their weights."""
        joined = torch.cat(list(values))
        lengths = torch.tensor([len(each) for each in values], dtype=torch.int32)
        return JaggedTensor(
            joined, None if weights is None else torch.cat(list(weights)), lengths.to(joined.device)
        )

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> JaggedTensor:
        """The first values of each row.

        Args:
            values: ``[B, T]`` or ``[B, T, D]``.
            lengths: whole numbers ``[B]``: so many of each row.
            weights: ``[B, T]``.

        Raises:
            DataError: for a length above T.
        """
        width = values.shape[1]
        if lengths.numel() and int(lengths.max()) > width:
            raise DataError(f"a length of {int(lengths.max())}", f"at most {width} values in a row")
        is_value = torch.arange(width, device=values.device) < lengths[:, None]
        return JaggedTensor(
            values[is_value], None if weights is None else weights[is_value], lengths
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
        return JaggedTensor(
            *self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until what the stream does now is done, as ``Tensor.record_stream``."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Of values, weights, and of lengths and offsets as far as they were made."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def to_dense(self) -> list[Tensor]:
        """The values of each sample."""
        return [self._values[begin:end] for begin, end in pairwise(self.offsets().tolist())]

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each sample; ``None`` without weights."""
        weights = self._of_weights()
        return None if weights is None else weights.to_dense()

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """The values as ``[B, T]`` or ``[B, T, D]``.

        The first T values of each sample, ``padding_value`` behind them.

        Args:
            desired_length: T; that of the longest sample when absent.
            padding_value: of places without a value.

        Raises:
            DataError: for offsets that fall, or end behind the values, and for a fraction among
                whole numbers.
        """
        lengths = self.lengths()
        longest = int(lengths.max()) if lengths.numel() else 0
        length = longest if desired_length is None else desired_length
        if length < 1:
            return self._values.new_empty(len(lengths), 0, *self._values.shape[1:])
        ragged = self._as_embeddings()
        padded = ragged.padded(length)
        if padding_value:
            if not padded.is_floating_point() and not float(padding_value).is_integer():
                raise DataError(f"padding of {padding_value} in {padded.dtype}", "a whole number")
            padded = padded.masked_fill(~ragged.mask(length)[:, :, None], padding_value)
        return padded.view(len(lengths), length, *self._values.shape[1:])

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """As :meth:`to_padded_dense`, of the weights; ``None`` without weights."""
        weights = self._of_weights()
        return None if weights is None else weights.to_padded_dense(desired_length, padding_value)

    def _as_embeddings(self) -> JaggedEmbeddings:
        """The values that the offsets reach, ``[V, D]``: these may be of a part of the values."""
        offsets = self.offsets().long().cpu()
        begin = int(offsets[0])
        end = int(offsets[-1])
        if bool((offsets.diff() < 0).any()) or end > len(self._values):
            raise DataError(
                f"offsets {begin} to {end} for {len(self._values)} values",
                "offsets that rise, at most to the number of values",
            )
        values = self._values[begin:end]
        flat = values[:, None] if values.ndim == 1 else values.flatten(1)
        return JaggedEmbeddings(flat, offsets - begin)

    def _of_weights(self) -> JaggedTensor | None:
        if self._weights is None:
            return None
        return JaggedTensor(self._weights, None, self._lengths, self._offsets)

    def _tensors(self) -> list[Tensor]:
        tensors = (self._values, self._weights, self._lengths, self._offsets)
        return [tensor for tensor in tensors if tensor is not None]

    def _changed(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Values, weights and lengths."""
        weights = None if self._weights is None else change(self._weights)
        return change(self._values), weights, change(self.lengths())

    def __str__(self) -> str:
        shown = [bag.tolist() for bag in self.to_dense()]
        weights = self.to_dense_weights()
        if weights is None:
            return f"JaggedTensor({{\n    {shown}\n}})\n"
        shown_weights = [bag.tolist() for bag in weights]
        return f'JaggedTensor({{\n    "values": {shown},\n    "weights": {shown_weights}\n}})\n'


def no_values(
    is_weighted: bool,
    device: torch.device | str | None,
    values_dtype: torch.dtype | None,
    weights_dtype: torch.dtype | None,
    lengths_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values, weights and lengths of ragged tensors without samples."""
    weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
    return (
        torch.empty(0, dtype=values_dtype, device=device),
        weights,
        torch.empty(0, dtype=lengths_dtype, device=device),
    )


def _whole_numbers(name: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not (tensor.is_floating_point() or tensor.dtype == torch.bool):
        return tensor
    if not tensor.numel():  # ``torch.tensor([])`` is of a float type
        return tensor.long()
    raise DataError(f"{name} of type {tensor.dtype}", "whole numbers", "call .long()")
