"""Minibatches from an encoded split: shuffled by seed and epoch, resumable at any batch.

Shape legend: B samples, F features, n dense features.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data.batch import Assigned, JaggedBatch, LoaderPosition, shares
from pibroch.data.dataset import Bags, Split
from pibroch.data.kernels.samples import gather_bags, gather_ids, gather_samples
from pibroch.data.order import EpochOrder
from pibroch.errors import CheckpointError, ConfigError
from pibroch.integers import whole_number


class Assignment(Protocol):
    """Which samples of each global batch a rank gets."""

    def at(self, position: LoaderPosition) -> Assigned:
        """Those of the batch that begins at a position, as many as without an assignment."""


class Loader:
    """Batches of a split.

    Iterating gives the rest of the current epoch and then moves to the next; the last batch of an
    epoch holds what is left. The order depends on ``seed``, the epoch and the split's size alone.
    Not safe to iterate from two threads.

    Args:
        split: the samples.
        batch_size: B, at least 1.
        shuffle: by ``order.EpochOrder``; otherwise in the order of the split.
        seed: of the shuffling.
        part: ``(rank, world_size)``: of each global batch of B samples, yield ``B * rank //
            world_size`` to ``B * (rank + 1) // world_size``, which may be none. Positions are those
            of the global batches.

    Raises:
        ConfigError: when ``batch_size`` is below 1, or for a rank outside its world.

    Attributes:
        assignment: other samples of each global batch instead; ``None`` for those side by side.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        rank, world_size = (whole_number(number, "a part with") for number in part)
        if rank >= world_size:
            raise ConfigError(
                f"rank {rank} of {world_size}", "a rank from 0 to the number of ranks - 1"
            )
        self.split = split
        self.shuffle = shuffle
        self.seed = operator.index(seed)
        self.batch_size = whole_number(batch_size, "batch size", 1)
        self.part = rank, world_size
        self.assignment: Assignment | None = None
        self._position = LoaderPosition(0, 0)
        self._order: tuple[int, EpochOrder] | None = None

    @property
    def position(self) -> LoaderPosition:
        """The next sample to deliver.

        A consumer that reads ahead keeps ``batch.position`` instead.
        """
        return self._position

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[JaggedBatch]:
        epoch = self._position.epoch
        while self._position.epoch == epoch:
            position = self._position
            self._position = self.after(position)
            if position.sample < len(self.split):
                yield self.batch_at(position)

    def after(self, position: LoaderPosition) -> LoaderPosition:
        """Where the batch that begins at a position ends."""
        stop = position.sample + self.batch_size
        is_last = stop >= len(self.split)
        return (
            LoaderPosition(position.epoch + 1, 0)
            if is_last
            else LoaderPosition(position.epoch, stop)
        )

    def batch_at(self, position: LoaderPosition) -> JaggedBatch:
        """The batch that begins at a position, wherever the loader stands.

        It is quickest where positions follow each other.
        """
        assigned = None if self.assignment is None else self.assignment.at(position)
        if assigned is None:
            start = position.sample
            rank = self.part[0]
            first, after = self.bounds_at(position)[rank : rank + 2]
            samples = self._samples(position.epoch, start + first, start + after)
        else:
            first = 0
            samples = self.samples_at(position)[assigned.places]
        batch = batch_of(self.split, samples, self.after(position))
        return replace(
            batch,
            first_sample=first,
            assigned=assigned,
            sample_weights=self._weights(position, samples),
            groups=None
            if self.split.groups is None
            else torch.from_numpy(self.split.groups[samples].view(np.int64)),
            event_times=None
            if self.split.event_times is None
            else torch.from_numpy(self.split.event_times[samples]),
        )

    def bounds_at(self, position: LoaderPosition) -> list[int]:
        """Where each rank's part of the global batch that begins there begins, and its end."""
        size = min(self.batch_size, len(self.split) - position.sample)
        world_size = self.part[1]
        return [size * rank // world_size for rank in range(world_size + 1)]

    def samples_at(self, position: LoaderPosition) -> NDArray[np.int64]:
        """Numbers in the split of the samples of the global batch that begins there."""
        stop = min(position.sample + self.batch_size, len(self.split))
        return self._samples(position.epoch, position.sample, stop)

    def _weights(self, position: LoaderPosition, samples: NDArray[np.int64]) -> Tensor | None:
        """Weights whose mean over the global batch is 1, of some of its samples.

        Each rank adds up the whole batch's, so that none has to be told.
        """
        weights = self.split.sample_weights
        if weights is None:
            return None
        every = self.samples_at(position)
        return shares(weights[samples], len(every), float(weights[every].sum(dtype=np.float64)))

    def weights_in_data(self) -> Iterator[NDArray[np.float32] | None]:
        """The weights of the samples of each batch of the epoch to come, as the data have them.

        Those in batches compare the samples of a step alone. ``None`` where samples have none.
        """
        position = self._position
        epoch = position.epoch
        while position.epoch == epoch and position.sample < len(self.split):
            bounds = self.bounds_at(position)[self.part[0] :]
            samples = self.samples_at(position)[bounds[0] : bounds[1]]
            weights = self.split.sample_weights
            yield None if weights is None else weights[samples]
            position = self.after(position)

    def _samples(self, epoch: int, first: int, after: int) -> NDArray[np.int64]:
        """Numbers of the samples at some places of an epoch."""
        return self._order_of(epoch).take(first, after) if self.shuffle else np.arange(first, after)

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, EpochOrder(len(self.split), self.seed, epoch)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """The position and what it depends on, plain values."""
        return self.state_at(self._position)

    def state_at(self, position: LoaderPosition) -> dict[str, Any]:
        """The state that goes on after the batch with this position."""
        return {
            "epoch": position.epoch,
            "sample": position.sample,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": len(self.split),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved state was; the batch size may differ.

        Raises:
            CheckpointError: when the state belongs to another order of samples.
        """
        here = self.state_dict()
        for key in ("seed", "shuffle", "num_samples"):
            if state.get(key) != here[key]:
                raise CheckpointError(
                    f"a data position with {key} {state.get(key)!r}",
                    f"{key} {here[key]!r}, as the loader has it",
                    "resume with the data and seed of the saved run",
                )
        self._position = LoaderPosition(int(state["epoch"]), int(state["sample"]))


def batch_of(
    split: Split, samples: NDArray[np.int64], position: LoaderPosition | None = None
) -> JaggedBatch:
    """The batch of chosen samples ``[B]``; cost linear in their ids.

    Raises:
        DataError: when the split's files are not any more what they were when the dataset was
            opened.
    """
    if split.files is not None:
        split.files.check()
    dense = np.empty((len(samples), split.dense.shape[1]), np.float32)
    labels = np.empty((len(samples), *split.labels.shape[1:]), np.float32)
    num_labels = labels.size // len(samples) if len(samples) else 1
    gather_samples(
        samples,
        split.labels.reshape(-1, num_labels),
        split.dense,
        labels.reshape(-1, num_labels),
        dense,
    )
    features = torch.from_numpy(dense), torch.from_numpy(labels)
    return _batch(split, samples, features, position)


def ids_of(split: Split, samples: NDArray[np.int64]) -> JaggedBatch:
    """As :func:`batch_of`, of ids alone: dense values ``[B, 0]``, labels 0."""
    if split.files is not None:
        split.files.check()
    return _batch(split, samples, (torch.empty(len(samples), 0), torch.zeros(len(samples))), None)


def _batch(
    split: Split,
    samples: NDArray[np.int64],
    features: tuple[Tensor, Tensor],
    position: LoaderPosition | None,
) -> JaggedBatch:
    size = len(samples)
    ids_FB = np.empty((split.ids.shape[1] + len(split.raw_keys), size), np.int64)
    is_raw = np.zeros(len(ids_FB), np.bool_)
    if split.raw_ids is not None:
        is_raw[:] = [key in split.raw_keys for key in split.single_keys]
        gather_ids(samples, split.raw_ids, np.flatnonzero(is_raw), ids_FB)
    gather_ids(samples, split.ids, np.flatnonzero(~is_raw), ids_FB)
    if not split.bags:
        return JaggedBatch.from_one_hot(
            features[0], split.keys, torch.from_numpy(ids_FB), features[1], position
        )
    values, offsets = _mixed(split, samples, ids_FB)
    return JaggedBatch(
        features[0],
        split.keys,
        torch.from_numpy(values),
        torch.from_numpy(offsets),
        features[1],
        None,
        position,
    )


def _mixed(
    split: Split, samples: NDArray[np.int64], ids_FB: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Values ``[V]`` and offsets ``[F * B + 1]`` where some features are multi-hot."""
    size = len(samples)
    lengths = np.ones((len(split.keys), size), np.int64)
    for place, key in enumerate(split.keys):
        if key in split.bags:
            offsets = split.bags[key].offsets
            lengths[place] = offsets[samples + 1] - offsets[samples]
    starts = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths.reshape(-1), out=starts[1:])
    values = np.empty(starts[-1], np.int64)
    one_hot = iter(ids_FB)
    for place, key in enumerate(split.keys):
        target = values[starts[place * size] : starts[(place + 1) * size]]
        if key in split.bags:
            bags: Bags = split.bags[key]
            gather_bags(samples, bags.values, bags.offsets, target)
        else:
            target[:] = next(one_hot)
    return values, starts
