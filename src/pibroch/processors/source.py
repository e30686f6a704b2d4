"""What a processor has to know to make a trainer's batches, and these batches, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pibroch.assignment import RankSchedule
from pibroch.data import JaggedBatch, Loader, LoaderPosition
from pibroch.data.batch import Assigned, one_hot_offsets
from pibroch.data.dataset import EncodedDataset

Plain = list[Any]


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
    """A loader's batch as tensors and numbers.

    Ids take 4 bytes, and there are no offsets where every bag has one id.
    """
    assert isinstance(batch.position, LoaderPosition), "made by a loader"
    assert batch.weights is None, "made by a loader"
    values = batch.values.to(torch.int32)
    offsets = None if is_one_hot else batch.offsets
    place = [batch.position.epoch, batch.position.sample, batch.first_sample]
    about = [batch.labels, batch.sample_weights, batch.groups, batch.event_times]
    places = None
    if batch.assigned is not None:
        places = torch.from_numpy(batch.assigned.places)
        place += [batch.assigned.transfers, batch.assigned.transfers_given]
    return [batch.dense, values, offsets, *about, places, place]


def from_plain(plain: Plain, keys: tuple[str, ...]) -> JaggedBatch:
    """The batch that :func:`to_plain` was given."""
    dense, values, offsets, labels, sample_weights, groups, event_times, places, place = plain
    epoch, sample, first_sample, *transfers = place
    assigned = None if places is None else Assigned(places.numpy(), *transfers)
    if offsets is None:
        offsets = one_hot_offsets(len(values))
    position = LoaderPosition(epoch, sample)
    return JaggedBatch(
        dense,
        keys,
        values.to(torch.int64),
        offsets,
        labels,
        None,
        position,
        first_sample,
        sample_weights=sample_weights,
        groups=groups,
        event_times=event_times,
        assigned=assigned,
    )


def num_bytes(plain: Plain) -> int:
    """Bytes of its tensors."""
    return sum(part.nbytes for part in plain if isinstance(part, Tensor))
