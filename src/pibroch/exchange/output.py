"""The result of a lookup where embeddings differ in width, or are not pooled.

Shape legend: B samples, V ids of one reader, D its table's width, T positions of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from operator import itemgetter

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

    def padded(self, length: int, last: bool = False) -> Tensor:
        """As ``[B, T, D]``: the first ``length`` ids of each sample, zeros behind them.

        With ``last`` the last ones, zeros before them.

        Raises:
            ConfigError: for a length below 1.
        """
        if length < 1:
            raise ConfigError(f"sequences padded to {length}", "at least 1")
        size = len(self.offsets) - 1
        dim = self.values.shape[1]
        lengths = self.lengths()
        sample = torch.repeat_interleave(torch.arange(size), lengths)
        first = self.offsets[1:] - length if last else self.offsets[:-1]
        place = torch.arange(len(self.values)) - first[sample]
        values = self.values
        rows = sample * length + place
        if bool((lengths > length).any()):
            kept = torch.nonzero((place >= 0) & (place < length)).squeeze(1)
            values = values.index_select(0, kept.to(values.device))
            rows = rows[kept]
        out = torch.zeros(size * length, dim, dtype=values.dtype, device=values.device)
        return out.index_copy(0, rows.to(values.device), values).view(size, length, dim)

    def mask(self, length: int, last: bool = False) -> Tensor:
        """Which positions of :meth:`padded` hold an id, bool ``[B, T]``."""
        places = torch.arange(length)
        places = places.flip(0) if last else places
        return (places < self.lengths()[:, None]).to(self.values.device)

    def summed(self) -> Tensor:
        """The sum of each sample's vectors, ``[B, D]``."""
        lengths = self.lengths()
        if bool((lengths == 1).all()):
            return self.values
        return self.padded(max(1, int(lengths.max()))).sum(1)


@dataclass(frozen=True, slots=True)
class ReaderPlace:
    """Where a reader's embeddings are: the number of its group, and its dim."""

    group: int
    dim: int


class EmbeddingOutput(Mapping[str, "Tensor | JaggedEmbeddings"]):
    """Embeddings by feature, in the order of the tables.

    A feature that reads several tables has a name for each, ``feature@table``.

    ``out["user"]`` is ``[B, D]``, or :class:`JaggedEmbeddings` where its table pools nothing.

    Args:
        places: by name.
        groups: embeddings of each group: of one that is pooled those of all such groups, ``[B, sum
            of D]``; else ``[V, D]``.
        offsets: for each group that is not pooled its batch's offsets ``[F * B + 1]``, for others
            ``None``.
    """

    def __init__(
        self,
        places: Mapping[str, ReaderPlace],
        groups: Sequence[Tensor],
        offsets: Sequence[Tensor | None],
    ) -> None:
        self._places = places
        self._groups = groups
        self._offsets = offsets

    def __getitem__(self, name: str) -> Tensor | JaggedEmbeddings:
        if name not in self._places:
            raise KeyError(f"{name!r}; there are {', '.join(self._places)}")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        part = self[next(iter(self))]
        return len(part) if isinstance(part, Tensor) else len(part.offsets) - 1

    def cat(self) -> Tensor:
        """All pooled embeddings side by side, ``[B, sum of D]``, in the order of the names.

        Raises:
            ConfigError: when none are pooled.
        """
        pooled = self._pooled()
        if not pooled:
            raise ConfigError(
                "cat() of embeddings that are not pooled", "pooled ones", "take each by its name"
            )
        return self._groups[next(iter(pooled.values())).group]

    def keyed_tensor(self) -> KeyedTensor:
        """The pooled ones in the layout, and with the methods, of TorchRec's ``KeyedTensor``."""
        pooled = self._pooled()
        return KeyedTensor(list(pooled), [place.dim for place in pooled.values()], self.cat())

    @property
    def tensors(self) -> list[Tensor]:
        """What holds the embeddings: one tensor for all that are pooled, and one a group else."""
        return list({id(each): each for each in self._groups}.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> EmbeddingOutput:
        """The same features in other :attr:`tensors`."""
        place = {id(each): number for number, each in enumerate(self.tensors)}
        groups = [tensors[place[id(each)]] for each in self._groups]
        return EmbeddingOutput(self._places, groups, self._offsets)

    def split(self, sizes: Sequence[int]) -> list[EmbeddingOutput]:
        """Of so many samples each, in their order, as ``torch.split`` does it.

        Args:
            sizes: that sum up to B.
        """
        if len(sizes) == 1:
            return [self]
        of_tensor = {
            id(group): [(part, None) for part in group.split(list(sizes))]
            if offsets is None
            else _split_jagged(group, offsets, sizes)
            for group, offsets in zip(self._groups, self._offsets, strict=True)
        }
        return [
            EmbeddingOutput(self._places, *zip(*parts, strict=True))
            for parts in zip(*(of_tensor[id(group)] for group in self._groups), strict=True)
        ]

    def _pooled(self) -> dict[str, ReaderPlace]:
        return {
            name: place
            for name, place in self._places.items()
            if self._offsets[place.group] is None
        }

    @cached_property
    def _parts(self) -> dict[str, Tensor | JaggedEmbeddings]:
        """The embeddings of all readers, split at once, so that their gradients join at once."""
        parts: dict[str, Tensor | JaggedEmbeddings] = {}
        pooled = self._pooled()
        if len(pooled) == 1:  # not split: the gradient of a part would be copied into the whole's
            parts |= dict.fromkeys(pooled, self.cat())
        elif pooled:
            parts |= zip(
                pooled, self.cat().split([place.dim for place in pooled.values()], 1), strict=True
            )
        for number, (embeddings, offsets) in enumerate(
            zip(self._groups, self._offsets, strict=True)
        ):
            if offsets is not None:
                names = [name for name, where in self._places.items() if where.group == number]
                parts |= zip(names, _jagged(embeddings, offsets, len(names)), strict=True)
        return parts


class OutputForm:
    """Makes users' results of an exchange's embeddings, a tensor for each group of tables.

    Args:
        tables: all.
        groups: of them.

    Attributes:
        is_tensor: whether users get one tensor, as all tables have one dim and are pooled.
        dtype: of the results.
    """

    def __init__(self, tables: Sequence[Table], groups: Sequence[TableGroup]) -> None:
        self._groups = groups
        pooled = [each.space.is_pooled for each in groups]
        self.dtype = torch.float32
        self.is_tensor = len({table.dim for table in tables}) == 1 and all(pooled)
        self._dim = tables[0].dim
        others = count(int(any(pooled)))
        self._tensor_of_group = [0 if is_pooled else next(others) for is_pooled in pooled]
        of_reader = {
            place: ReaderPlace(n, each.space.dim)
            for n, each in enumerate(groups)
            for place in each.places
        }
        self._places = {
            name: of_reader[number] for number, name in enumerate(names_of_readers(tables))
        }

    def joined(self, batch: JaggedBatch, embeddings: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a lookup, each once; ``[B, F, D]`` where there is only that one."""
        return tuple(embeddings) if batch.by_id else self._joined(embeddings)

    def _joined(self, embeddings: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.is_tensor:
            num_samples, width = embeddings[0].shape  # a view is half the time of unflatten
            return (embeddings[0].view(num_samples, width // self._dim, self._dim),)
        return tuple(
            dict(
                sorted(zip(self._tensor_of_group, embeddings, strict=True), key=itemgetter(0))
            ).values()
        )

    def gradients(self, batch: JaggedBatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`joined` for gradients: float32, contiguous, one for each group."""
        # asking costs less than two calls that do nothing
        plain = [
            each
            if each.dtype == torch.float32 and each.is_contiguous()
            else each.contiguous().float()
            for each in gradients
        ]
        if batch.by_id:
            return plain
        return [plain[number].flatten(1) for number in self._tensor_of_group]

    def of(self, batch: JaggedBatch, tensors: Sequence[Tensor]) -> Tensor | EmbeddingOutput:
        """What users get for the tensors of a lookup."""
        if batch.by_id:
            tensors = self._joined(
                self._side_by_side(pool_by_weights(self._groups, batch, tensors))
            )
        if self.dtype != torch.float32:
            tensors = [each.to(self.dtype) for each in tensors]
        if self.is_tensor:
            return tensors[0]
        spaces = [each.space for each in self._groups]
        offsets = [
            None if space.is_pooled else batch.offsets_of(space.features) for space in spaces
        ]
        return EmbeddingOutput(
            self._places, [tensors[number] for number in self._tensor_of_group], offsets
        )

    def by_feature(
        self, batch: JaggedBatch, tensors: Sequence[Tensor]
    ) -> Mapping[str, Tensor | JaggedEmbeddings]:
        """The same by the features' names, also where users get one tensor.

        What towers that run inside the lookup read is of some features, and has no names here.
        """
        out = self.of(batch, tensors)
        if not isinstance(out, Tensor):
            return out
        names: Sequence[str] = list(self._places)
        if out.shape[1] != len(names):
            names = [f"feature {number} of this rank's towers" for number in range(out.shape[1])]
        return dict(zip(names, out.unbind(1), strict=True))

    def _side_by_side(self, embeddings_of_groups: Sequence[Tensor]) -> list[Tensor]:
        """Embeddings as an exchange gives them, from those of each group, pooled ``[B, F, D]``."""
        parts: dict[int, Tensor] = {}
        for each, embeddings in zip(self._groups, embeddings_of_groups, strict=True):
            if each.space.is_pooled:
                parts |= zip(each.places, embeddings.unbind(1), strict=True)
        joined = torch.cat([parts[place] for place in sorted(parts)], 1) if parts else None
        return [
            joined if each.space.is_pooled and joined is not None else embeddings
            for each, embeddings in zip(self._groups, embeddings_of_groups, strict=True)
        ]


def _split_jagged(
    values: Tensor, offsets: Tensor, sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor | None]]:
    """Vectors of several readers, and their offsets, by parts of so many samples."""
    lengths = (offsets[1:] - offsets[:-1]).view(-1, sum(sizes)).split(list(sizes), 1)
    counts = torch.stack([part.sum(1) for part in lengths], 1)
    vectors = values.split(counts.view(-1).tolist())
    return [
        (
            torch.cat(vectors[number :: len(sizes)]),
            torch.cat([offsets[:1] * 0, part.reshape(-1).cumsum(0)]),
        )
        for number, part in enumerate(lengths)
    ]


def _jagged(values: Tensor, offsets: Tensor, num_readers: int) -> list[JaggedEmbeddings]:
    size = (len(offsets) - 1) // num_readers
    ends = offsets[::size].tolist() if size else [0] * (num_readers + 1)
    parts = (
        values.split([end - start for start, end in pairwise(ends)])
        if num_readers > 1
        else (values,)
    )
    return [
        JaggedEmbeddings(part, offsets[number * size : (number + 1) * size + 1] - start)
        for number, (part, start) in enumerate(zip(parts, ends[:-1], strict=True))
    ]
