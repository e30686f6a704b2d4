"""What trainers call on a data processor, by name through :mod:`pibroch.rpc`.

A processor keeps no state that a trainer depends on: who asks says everything, so any processor can
answer, also one that was started anew. What it keeps are open datasets and the orders of their
epochs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pibroch.assignment import RankPart, RowAssigner, RowsOf, Schedule
from pibroch.data import EncodedDataset, Loader, LoaderPosition
from pibroch.errors import DataError, ProtocolError
from pibroch.processors.source import Plain, Source, to_plain

MOST_LOADERS = 256
"""One for each trainer; of a large dataset each holds an order of 2 MB."""
MOST_SCHEDULES = 2
"""One for each run; each holds 33 MB."""


class Processor:
    """This process's datasets and loaders.

    Attributes:
        data: where the dataset lies here, instead of where trainers say.
    """

    def __init__(self) -> None:
        self.data: Path | None = None
        self._lock = threading.Lock()
        self._datasets: OrderedDict[tuple[Path, str], EncodedDataset] = OrderedDict()
        self._loaders: OrderedDict[Source, tuple[threading.Lock, Loader]] = OrderedDict()
        self._schedules: OrderedDict[Source, Schedule] = OrderedDict()

    def batch(self, source: Source, position: LoaderPosition) -> Plain:
        """The batch of a trainer's loader that begins at a position.

        Raises:
            DataError: when the dataset is not here, is damaged, or is another one.
            ProtocolError: for a position outside the split.
        """
        lock, loader = self._loader(source)
        if position.epoch < 0 or not 0 <= position.sample < len(loader.split):
            raise ProtocolError(
                f"{position} wanted of {len(loader.split):,} samples", "a sample of the split"
            )
        with lock:
            try:
                batch = loader.batch_at(position)
            except DataError:
                self._forget(source)
                raise
        return to_plain(batch, is_one_hot=not loader.split.bags)

    def _loader(self, source: Source) -> tuple[threading.Lock, Loader]:
        with self._lock:
            locked_loader = self._loaders.get(source)
            if locked_loader is None:
                loader = source.loader(self._dataset(source))
                if source.rows:
                    loader.assignment = RankPart(source.rank, self._schedule(source))
                locked_loader = self._loaders[source] = threading.Lock(), loader
            self._loaders.move_to_end(source)
            if len(self._loaders) > MOST_LOADERS:
                self._loaders.popitem(last=False)
        return locked_loader

    def _schedule(self, source: Source) -> Schedule:
        """The assignment of samples to ranks, which the loaders of all ranks share."""
        schedule = self._schedules.get(source.of_all_ranks)
        if schedule is None:
            schedule = self._schedules[source.of_all_ranks] = Schedule(
                source.loader(self._dataset(source)),
                RowAssigner(RowsOf.of_described(source.rows)),
            )
            if len(self._schedules) > MOST_SCHEDULES:
                self._schedules.popitem(last=False)
        return schedule

    def _forget(self, source: Source) -> None:
        """The dataset's files have changed.

        Whoever asks again gets what is there now, if that is the same dataset.
        """
        with self._lock:
            self._loaders.pop(source, None)
            self._schedules.pop(source.of_all_ranks, None)
            self._datasets.pop((self.data or Path(source.path), source.digest), None)

    def _dataset(self, source: Source) -> EncodedDataset:
        path = self.data or Path(source.path)
        dataset = self._datasets.get((path, source.digest))
        if dataset is None:
            dataset = EncodedDataset.open(path)
            if dataset.digest != source.digest:
                raise DataError(
                    f"{path} on a data processor, which is not the trainers' dataset",
                    "a copy of it",
                    "copy the trainers' dataset there, and name its folder by --data",
                )
            self._datasets[path, source.digest] = dataset
            if len(self._datasets) > 4:
                self._datasets.popitem(last=False)
        return dataset


PROCESSOR = Processor()


def batch(source: Sequence[Any], epoch: int, sample: int) -> Plain:
    """A batch as tensors and numbers, see :func:`to_plain`.

    Args:
        source: fields of a :class:`Source`.
        epoch: in which the batch begins.
        sample: of the epoch, with which it begins.

    Raises:
        DataError: when the dataset is not here, is damaged, or is another one.
    """
    return PROCESSOR.batch(Source(*source), LoaderPosition(epoch, sample))
