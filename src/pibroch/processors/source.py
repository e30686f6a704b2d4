"""What a processor has to know to make a trainer's batches, and these batches, as plain data."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.assignment import RankSchedule
from pibroch.data import JaggedBatch, Loader, LoaderPosition
from pibroch.data.batch import Assigned, one_hot_offsets
from pibroch.data.dataset import EncodedDataset
from pibroch.data.streams.base import StreamPosition

Plain = dict[str, Any]
"""A batch by field."""


@dataclass(frozen=True, slots=True)
class Source:
    """A trainer's loader: everything on which its batches depend.

    Attributes:
        path: of the dataset, as the trainer knows it.
        digest: of its contents.
        split: by name.
        batch_size, shuffle, seed, rank, world_size: as a :class:`Loader` takes them.
        rows: by which samples are assigned, see :meth:`RowsOf.described`; empty where ranks have
            those side by side.
    """

    path: str
    digest: str
    split: str
    batch_size: int
    shuffle: bool
    seed: int
    rank: int
    world_size: int
    rows: str = ""

    @classmethod
    def of(cls, dataset: EncodedDataset, loader: Loader) -> Source:
        """What a loader of this dataset gives.

        Raises:
            ConfigError: where its samples are assigned by what a processor cannot know.
        """
        assignment = loader.assignment
        rows = assignment.rows if isinstance(assignment, RankSchedule) else None
        path = str(dataset.path.absolute())
        return cls(
            path,
            dataset.digest,
            loader.split.name,
            loader.batch_size,
            loader.shuffle,
            loader.seed,
            *loader.part,
            "" if rows is None else rows.described(),
        )

    @property
    def of_all_ranks(self) -> Source:
        """What the loaders of all ranks have in common."""
        return replace(self, rank=0)

    def loader(self, dataset: EncodedDataset) -> Loader:
        """The same over this copy of the dataset.

        Raises:
            DataError: when it has no such split.
            ConfigError: for what no loader takes.
        """
        part = self.rank, self.world_size
        split = dataset.split(self.split)  # type: ignore[arg-type]  # checked there
        return Loader(split, self.batch_size, shuffle=self.shuffle, seed=self.seed, part=part)


def to_plain(batch: JaggedBatch, is_one_hot: bool) -> Plain:
    """A loader's batch as tensors and numbers, by field; the features' names are not sent.

    Ids take 4 bytes where all of the batch's fit, and there are no offsets where every bag has one
    id.
    """
    assert not isinstance(batch.position, StreamPosition), "made by a loader"
    assert batch.fresh is None, "made by a loader"
    plain = {
        field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "keys"
    }
    narrow = batch.values.to(torch.int32)
    if bool((narrow == batch.values).all()):
        plain["values"] = narrow
    if is_one_hot:
        plain["offsets"] = None
    if batch.position is not None:
        plain["position"] = astuple(batch.position)
    if (assigned := batch.assigned) is not None:
        plain["assigned"] = assigned.places, assigned.transfers, assigned.transfers_given
    return plain


def from_plain(plain: Plain, keys: tuple[str, ...]) -> JaggedBatch:
    """The batch that :func:`to_plain` was given."""
    parts = dict(plain, keys=keys, values=plain["values"].to(torch.int64))
    if parts["offsets"] is None:
        parts["offsets"] = one_hot_offsets(len(parts["values"]))
    if parts["position"] is not None:
        parts["position"] = LoaderPosition(*parts["position"])
    if parts["assigned"] is not None:
        parts["assigned"] = Assigned(*parts["assigned"])
    return JaggedBatch(**parts)


def num_bytes(plain: Plain) -> int:
    """Bytes of its tensors, and of the samples' places."""
    parts = [*plain.values(), *(plain["assigned"] or ())]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor | np.ndarray))
