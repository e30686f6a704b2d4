"""One minibatch: dense values, jagged categorical ids and labels.

Shape legend: B samples, F categorical features, V ids in all, n dense features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data.batch_check import check_batch, check_keyed, check_samples
from pibroch.data.streams.base import StreamPosition
from pibroch.errors import DataError


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where a loader stands *after* a batch: the next sample of this epoch to deliver."""

    epoch: int
    sample: int


@dataclass(frozen=True, slots=True)
class FreshRows:
    """Rows of tables of raw ids that begin anew with a batch, by table.

    Attributes:
        rows: int64 ``[N]``.
        ids: whose rows these are from now on, int64 ``[N]``, rising.
        seed: of their initial weights.
    """

    rows: Mapping[str, NDArray[np.int64]]
    ids: Mapping[str, NDArray[np.int64]]
    seed: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """Which samples of a global batch one rank has, where they were assigned by their rows.

    Attributes:
        places: int64 ``[B]``, the samples' places in the global batch, rising.
        transfers: vectors that are expected to cross between ranks for the global batch.
        transfers_given: likewise if the samples were where they are without an assignment.
    """

    places: NDArray[np.int64]
    transfers: int
    transfers_given: int


@dataclass(frozen=True, slots=True)
class JaggedBatch:
    """A minibatch of B samples.

    ``values`` is feature-major: the bags of ``keys[0]`` in sample order, then those of ``keys[1]``,
    and so on. Bag ``f * B + b`` is ``values[offsets[f * B + b] : offsets[f * B + b + 1]]``.

    Attributes:
        dense: float32 ``[B, n]``, transformed.
        keys: the F feature names.
        values: int64 ``[V]``, ids local to each feature's table.
        offsets: int64 ``[F * B + 1]``.
        labels: float32 ``[B]``, or ``[B, T]`` of T tasks.
        weights: float32 ``[V]`` or ``None`` for all ones.
        position: where the loader stands after this batch, ``None`` when made by hand.
        first_sample: place of the first sample in the global batch, of which this is one rank's
            part; 0 where ``assigned`` says all places.
        by_id: whether rows are wanted id by id, neither scaled nor pooled: for weights that are
            learned.
        fresh: what begins anew with it, in a batch whose values are rows of tables of raw ids; the
            same on all ranks.
        sample_weights: float32 ``[B]``, each sample's share in the loss, with a mean of 1 over the
            global batch; ``None`` for all ones.
        groups: int64 ``[B]``, equal for samples that are ranked among each other; ``None`` without
            groups.
        event_times: int64 ``[B]``, when each sample's event was, in milliseconds since 1970 (UTC);
            ``None`` where nobody said.
        assigned: where the samples are not side by side in the global batch, see
            :meth:`pibroch.Embeddings.assign`.
    """

    dense: Tensor
    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    labels: Tensor
    weights: Tensor | None = None
    position: LoaderPosition | StreamPosition | None = None
    first_sample: int = 0
    by_id: bool = False
    fresh: FreshRows | None = None
    sample_weights: Tensor | None = None
    groups: Tensor | None = None
    event_times: Tensor | None = None
    assigned: Assigned | None = None

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return int(self.labels.shape[0])

    @property
    def has_shared_offsets(self) -> bool:
        """Whether offsets are those that all batches with one id a bag share."""
        return self.offsets.data_ptr() == one_hot_offsets(self.offsets.numel() - 1).data_ptr()

    def to(self, *_: Any, **__: Any) -> JaggedBatch:
        """The batch itself, for trainers such as Lightning that move whatever a loader gives.

        Ids stay in host memory, as rows do; move ``dense`` and ``labels`` to where they are used.
        """
        return self

    def lengths(self) -> Tensor:
        """Ids per bag, int64 ``[F * B]``."""
        return self.offsets[1:] - self.offsets[:-1]

    def validate(self) -> None:
        """Check types, shapes, that weights are finite and that offsets rise from 0 to V.

        Done when a batch is made and again by :meth:`select`, through which every batch enters an
        exchange: its tensors may have been written to in between.

        Raises:
            DataError: when a field does not fit the others, or weights ask for a gradient that they
                would not get.
        """
        check_batch(self.keys, self.dense, self.values, self.offsets, self.labels, self.weights)
        check_samples(len(self.labels), self.sample_weights, self.groups, self.event_times)

    def __post_init__(self) -> None:
        self.validate()

    def select(self, keys: tuple[str, ...]) -> JaggedBatch:
        """The batch with exactly these features in this order, of which one may stand there twice.

        Where it has exactly these already, the batch itself is returned.

        Raises:
            DataError: when a feature is not in the batch, or :meth:`validate` refuses it.
        """
        self.validate()
        return self.pick(keys)

    def pick(self, keys: tuple[str, ...]) -> JaggedBatch:
        """As :meth:`select`, of a batch that was checked.

        Raises:
            DataError: when a feature is not in the batch.
        """
        if keys == self.keys:
            return self
        size = self.batch_size
        index = _places(tuple(self.keys), tuple(keys))
        if self.weights is None and self.has_shared_offsets:
            ids_FB = self.values.view(len(self.keys), size)
            first = min(index, default=0)
            count = len(index)
            is_span = index == (*range(first, first + count),)  # no copy then
            values = (ids_FB.narrow(0, first, count) if is_span else ids_FB[list(index)]).view(-1)
            offsets = one_hot_offsets(values.numel())
            return self._with_parts(keys=keys, values=values, offsets=offsets)
        spans = [(int(self.offsets[i * size]), int(self.offsets[(i + 1) * size])) for i in index]
        offsets = self.offsets_of(keys)
        values = torch.cat([self.values[begin:end] for begin, end in spans])
        weights = (
            None
            if self.weights is None
            else torch.cat([self.weights[begin:end] for begin, end in spans])
        )
        return self._with_parts(keys=keys, values=values, offsets=offsets, weights=weights)

    def offsets_of(self, keys: tuple[str, ...]) -> Tensor:
        """The offsets that :meth:`pick` gives, int64 ``[len(keys) * B + 1]``; no ids are copied.

        Raises:
            DataError: when a feature is not in the batch.
        """
        if keys == self.keys:
            return self.offsets
        lengths = (
            self.lengths()
            .view(len(self.keys), self.batch_size)[list(_places(tuple(self.keys), tuple(keys)))]
            .reshape(-1)
        )
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return offsets

    def with_rows(self, rows: Tensor, fresh: FreshRows | None) -> JaggedBatch:
        """The batch, which was checked, with a row in place of each id; ``fresh`` begin anew."""
        return self._with_parts(values=rows, fresh=fresh)

    def _with_parts(self, **parts: object) -> JaggedBatch:
        """A batch with some other parts than this one, which was checked, without a further check.

        A key stands there twice where a table lies in blocks of columns.
        """
        made = object.__new__(JaggedBatch)
        for name in self.__slots__:
            object.__setattr__(made, name, parts[name] if name in parts else getattr(self, name))
        return made

    def with_empty(self, keys: tuple[str, ...]) -> JaggedBatch:
        """The batch with further features, all of whose bags are empty."""
        ends = self.offsets[-1:].expand(len(keys) * self.batch_size)
        return replace(self, keys=(*self.keys, *keys), offsets=torch.cat([self.offsets, ends]))

    @classmethod
    def from_one_hot(
        cls,
        dense: Tensor,
        keys: Sequence[str],
        ids_FB: Tensor,
        labels: Tensor,
        position: LoaderPosition | None = None,
    ) -> JaggedBatch:
        """A batch in which each bag holds exactly one id.

        ``ids_FB`` is int64 ``[F, B]`` and is not copied.

        Raises:
            DataError: for ids that do not have one row a key.
        """
        if ids_FB.ndim != 2 or len(ids_FB) != len(keys):
            raise DataError(
                f"ids {list(ids_FB.shape)} for {len(keys)} keys",
                "ids [F, B], one row a key",
                "transpose",
            )
        return cls(
            dense,
            tuple(keys),
            ids_FB.reshape(-1),
            one_hot_offsets(ids_FB.numel()),
            labels,
            None,
            position,
        )

    @classmethod
    def from_keyed_jagged(
        cls, jagged: object, dense: Tensor | None = None, labels: Tensor | None = None
    ) -> JaggedBatch:
        """A batch from TorchRec's ``KeyedJaggedTensor``, or from anything with its methods.

        These are ``keys()``, ``values()``, ``lengths()`` and perhaps ``weights_or_none()``. Missing
        ``dense`` becomes ``[B, 0]``, missing ``labels`` zeros.

        Raises:
            DataError: when the object lacks one of these methods, its keys differ in their number
                of samples, or :meth:`validate` refuses what it holds.
        """
        methods: list[Callable[[], Any] | None] = [
            getattr(jagged, name, None) for name in ("keys", "values", "lengths")
        ]
        if not all(callable(method) for method in methods):
            raise DataError(
                f"a {type(jagged).__name__} as a batch",
                "a JaggedBatch, or an object with keys(), values() and lengths()",
                "wrap the ids in pibroch.JaggedBatch or torchrec.KeyedJaggedTensor",
            )
        keys, values, lengths = (method() for method in methods if method is not None)
        check_keyed(jagged, keys, values, lengths)
        size = lengths.numel() // len(keys)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        weights_or_none = getattr(jagged, "weights_or_none", None)
        weights = weights_or_none() if callable(weights_or_none) else None
        return cls(
            torch.empty(size, 0) if dense is None else dense,
            tuple(keys),
            values.to(torch.int64),
            offsets,
            torch.zeros(size) if labels is None else labels,
            weights,
        )


def shares(weights: NDArray[np.float32], num_samples: int, total: float) -> Tensor:
    """Sample weights as shares in the loss, float32 ``[B]``, of a global batch.

    Args:
        weights: of some of its samples, ``[B]``.
        num_samples: of the global batch.
        total: of all its weights.
    """
    scale = np.float64(num_samples / total if total else 0.0)  # one of Python's would be rounded
    return torch.from_numpy((weights * scale).astype(np.float32))


@lru_cache(maxsize=256)
def _places(batch_keys: tuple[str, ...], keys: tuple[str, ...]) -> tuple[int, ...]:
    """Of the features ``keys`` among those of a batch."""
    place = {key: index for index, key in enumerate(batch_keys)}
    absent = [key for key in keys if key not in place]
    if absent:
        raise DataError(f"a batch without feature {absent[0]!r}", f"the features {list(keys)}")
    return tuple(place[key] for key in keys)


@lru_cache(maxsize=64)
def one_hot_offsets(num_bags: int) -> Tensor:
    """Offsets of bags with one id each, int64 ``[num_bags + 1]``; shared, not to be written to."""
    return torch.arange(num_bags + 1)
