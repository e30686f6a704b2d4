"""What a lookup gives where embeddings differ in width, or are not pooled.

Shape legend: B samples, V ids of one reader, D its table's width, T positions of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import Table, TableGroup, names_of_readers
from pibroch.errors import ConfigError
from pibroch.exchange.keyed_tensor import KeyedTensor
from pibroch.exchange.learned_weights import pool_by_weights


@dataclass(frozen=True, slots=True, eq=False)
class JaggedEmbeddings:
    """A vector for each id of a feature.

    Attributes:
        values: float32 ``[V, D]``, sample by sample.
        offsets: int64 ``[B + 1]``: sample b has the rows ``values[offsets[b] : offsets[b + 1]]``.
    """

    values: Tensor
    offsets: Tensor

    def lengths(self) -> Tensor:
        """Ids of each sample, int64 ``[B]``."""
        return self.offsets[1:] - self.offsets[:-1]

    def padded(self, length: int) -> Tensor:
        """As ``[B, T, D]``: the first ``length`` ids of each sample, zeros behind them.

        Raises:
            ConfigError: for a length below 1.
        """
        if length < 1:
            raise ConfigError(f"sequences padded to {length}", "at least 1")
        size, dim = len(self.offsets) - 1, self.values.shape[1]
        lengths = self.lengths()
        sample = torch.repeat_interleave(torch.arange(size), lengths)
        place = torch.arange(len(self.values)) - self.offsets[:-1][sample]
        values, rows = self.values, sample * length + place
        if bool((lengths > length).any()):
            kept = torch.nonzero(place < length).squeeze(1)
            values, rows = values.index_select(0, kept), rows[kept]
        out = torch.zeros(size * length, dim, dtype=values.dtype, device=values.device)
        return out.index_copy(0, rows.to(values.device), values).view(size, length, dim)

    def mask(self, length: int) -> Tensor:
        """Which positions of :meth:`padded` hold an id, bool ``[B, T]``."""
        return (torch.arange(length) < self.lengths()[:, None]).to(self.values.device)


@dataclass(frozen=True, slots=True)
class ReaderPlace:
    """Where a reader's embeddings are: the number of its group, and its place among the group's readers."""

    group: int
    place: int


class EmbeddingOutput(Mapping[str, "Tensor | JaggedEmbeddings"]):
    """Embeddings by feature, or ``feature@table`` for one that reads several tables, in the order of the tables.

    ``out["user"]`` is ``[B, D]``, or :class:`JaggedEmbeddings` where its table pools nothing.

    Args:
        places: by name.
        groups: embeddings of each group: ``[B, F, D]``, or ``[V, D]`` with its bounds.
        offsets: for each group that is not pooled its batch's offsets ``[F * B + 1]``, for others ``None``.
    """

    def __init__(
        self, places: Mapping[str, ReaderPlace], groups: Sequence[Tensor], offsets: Sequence[Tensor | None]
    ) -> None:
        self._places, self._groups, self._offsets = places, groups, offsets

    def __getitem__(self, name: str) -> Tensor | JaggedEmbeddings:
        where = self._places.get(name)
        if where is None:
            raise KeyError(f"{name!r}; there are {', '.join(self._places)}")
        return self._by_group[where.group][where.place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def batch_size(self) -> int:
        """B."""
        part = self[next(iter(self))]
        return len(part) if isinstance(part, Tensor) else len(part.offsets) - 1

    def cat(self) -> Tensor:
        """All pooled embeddings side by side, ``[B, sum of D]``, in the order of the names.

        Raises:
            ConfigError: when none are pooled.
        """
        pooled = self._pooled()
        if not pooled:
            raise ConfigError("cat() of embeddings that are not pooled", "pooled ones", "take each by its name")
        if len(self._groups) == 1:
            return self._groups[0].flatten(1)
        numbers = sorted({place.group for place in pooled.values()})
        joined: Tensor = _SideBySide.apply(_spans(pooled, self._groups), *(self._groups[number] for number in numbers))
        return joined

    def keyed_tensor(self) -> KeyedTensor:
        """The pooled ones in the layout, and with the methods, of TorchRec's ``KeyedTensor``."""
        pooled = self._pooled()
        return KeyedTensor(list(pooled), [self._groups[place.group].shape[-1] for place in pooled.values()], self.cat())

    def _pooled(self) -> dict[str, ReaderPlace]:
        return {name: place for name, place in self._places.items() if self._offsets[place.group] is None}

    @cached_property
    def _by_group(self) -> list[Sequence[Tensor] | Sequence[JaggedEmbeddings]]:
        """Each group's readers; taken apart at once, so that a backward pass puts their gradients together at once."""
        counts = [sum(place.group == number for place in self._places.values()) for number in range(len(self._groups))]
        found: list[Sequence[Tensor] | Sequence[JaggedEmbeddings]] = []
        for embeddings, offsets, count in zip(self._groups, self._offsets, counts, strict=True):
            if offsets is not None:
                found.append(_jagged(embeddings, offsets, count))
            else:  # one alone is no part, whose gradient would be copied into one of the whole
                found.append([embeddings.squeeze(1)] if count == 1 else embeddings.unbind(1))
        return found


class OutputForm:
    """How an exchange's embeddings, one tensor a group of tables, become what users get.

    Args:
        tables: all.
        groups: of them.

    Attributes:
        is_tensor: whether that is one tensor, as all tables have one dim and are pooled.
    """

    def __init__(self, tables: Sequence[Table], groups: Sequence[TableGroup]) -> None:
        self._groups = groups
        self.is_tensor = len({table.dim for table in tables}) == 1 and all(each.space.is_pooled for each in groups)
        of_reader = {
            place: ReaderPlace(number, inside)
            for number, each in enumerate(groups)
            for inside, place in enumerate(each.places)
        }
        self._places = {name: of_reader[number] for number, name in enumerate(names_of_readers(tables))}

    def joined(self, batch: JaggedBatch, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What leaves a lookup: all groups as one ``[B, F, D]`` where they fit into one."""
        if not self.is_tensor or len(found) == 1 or batch.by_id:
            return tuple(found)
        out_BFD = torch.empty(len(found[0]), len(self._places), found[0].shape[2])
        for each, part in zip(self._groups, found, strict=True):
            out_BFD[:, list(each.places)] = part
        return (out_BFD,)

    def gradients(self, batch: JaggedBatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The inverse, as the exchange wants them."""
        if not self.is_tensor or len(self._groups) == 1 or batch.by_id:
            return [gradient.contiguous().float() for gradient in gradients]
        return [gradients[0][:, list(each.places)].contiguous().float() for each in self._groups]

    def of(self, batch: JaggedBatch, found: Sequence[Tensor]) -> Tensor | EmbeddingOutput:
        """What users get."""
        if batch.by_id:
            found = pool_by_weights(self._groups, batch, found)
            if self.is_tensor and len(found) > 1:
                order = torch.tensor([place for each in self._groups for place in each.places]).argsort()
                found = [torch.cat(list(found), 1).index_select(1, order.to(found[0].device))]
        if self.is_tensor:
            return found[0]
        spaces = [each.space for each in self._groups]
        offsets = [None if space.is_pooled else batch.offsets_of(space.features) for space in spaces]
        return EmbeddingOutput(self._places, found, offsets)


Span = tuple[slice, slice]
"""Readers of a group that follow each other, and their columns among those of all groups."""


def _spans(places: Mapping[str, ReaderPlace], groups: Sequence[Tensor]) -> list[list[Span]]:
    """For each group that is pooled, the spans of its readers."""
    found: dict[int, list[Span]] = {number: [] for number in sorted({place.group for place in places.values()})}
    column = 0
    for where in places.values():
        spans, dim = found[where.group], groups[where.group].shape[2]
        inside, columns = slice(where.place, where.place + 1), slice(column, column + dim)
        if spans and (spans[-1][0].stop, spans[-1][1].stop) == (where.place, column):
            inside, columns = (
                slice(old.start, new.stop) for old, new in zip(spans.pop(), (inside, columns), strict=True)
            )
        spans.append((inside, columns))
        column += dim
    return list(found.values())


class _SideBySide(torch.autograd.Function):
    """``torch.cat`` of readers, in as few copies as their order allows, and as few back."""

    @staticmethod
    def forward(ctx: Any, spans: list[list[Span]], *groups: Tensor) -> Tensor:
        """Embeddings of each group, ``[B, F, D]``, as ``[B, sum of D]``."""
        width = sum(group.shape[1] * group.shape[2] for group in groups)
        ctx.spans, ctx.shapes = spans, [group.shape for group in groups]
        out = groups[0].new_empty(len(groups[0]), width)
        for of_group, group in zip(spans, groups, strict=True):
            for inside, columns in of_group:
                out[:, columns] = group[:, inside].flatten(1)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of each group."""
        (gradient,) = gradients
        found = []
        for of_group, shape in zip(ctx.spans, ctx.shapes, strict=True):
            of_this = gradient.new_empty(shape)
            for inside, columns in of_group:
                of_this[:, inside] = gradient[:, columns].unflatten(1, (inside.stop - inside.start, shape[2]))
            found.append(of_this)
        return None, *found


def _jagged(values: Tensor, offsets: Tensor, num_readers: int) -> list[JaggedEmbeddings]:
    size = (len(offsets) - 1) // num_readers
    ends = offsets[::size].tolist() if size else [0] * (num_readers + 1)
    parts = values.split([end - start for start, end in pairwise(ends)]) if num_readers > 1 else (values,)
    return [
        JaggedEmbeddings(part, offsets[number * size : (number + 1) * size + 1] - start)
        for number, (part, start) in enumerate(zip(parts, ends[:-1], strict=True))
    ]
