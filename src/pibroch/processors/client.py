"""A trainer's way to data processors: what its loader would give, made elsewhere, in the loader's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import cycle, islice

import torch

from pibroch import rpc
from pibroch.collectives import Ranks
from pibroch.data import EncodedDataset, JaggedBatch, Loader, LoaderPosition
from pibroch.errors import RpcError
from pibroch.observability.trace import span
from pibroch.processors import processor
from pibroch.processors.source import Source, from_plain, num_bytes
from pibroch.roles.losses import out_of_reach

MOST_PER_PROCESSOR = 4
"""Batches under way from each."""
MOST_BYTES = 256 << 20
"""Of batches under way to this trainer, as long as each processor has one to make."""


class Processors:
    """Data processors, as one trainer uses them: of N, number p makes each N-th of its batches, beginning with the p-th.

    Args:
        names: of the processors, workers of this process's RPC group.
        ranks: whose traffic and waiting is counted.

    Attributes:
        num_bytes: that came from them so far.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks) -> None:
        self.names, self.num_bytes = tuple(names), 0
        self._ranks = ranks
        self._largest: int | None = None

    def batches(self, dataset: EncodedDataset, loader: Loader, num_batches: int) -> Iterator[JaggedBatch]:
        """What ``loader`` would give from where it stands, over the ends of epochs; it stays where it stands.

        Args:
            dataset: whose split the loader reads.
            loader: of this trainer.
            num_batches: how many.

        Raises:
            TrainingError: when a processor is lost, or does not answer for as long as collectives may wait.
            DataError: when a processor cannot read the dataset.
        """
        source = list(astuple(Source.of(dataset, loader)))
        positions, turns = islice(_positions(loader), num_batches), cycle(self.names)
        under_way: deque[tuple[str, torch.futures.Future[list[object]]]] = deque()
        while True:
            for position in islice(positions, max(0, self._most() - len(under_way))):
                under_way.append((name := next(turns), self._ask(name, source, position)))
            if not under_way:
                return
            yield self._receive(*under_way.popleft(), loader.split.keys)

    def _most(self) -> int:
        """Batches that may be under way."""
        num_names = len(self.names)
        if self._largest is None:
            return num_names
        return max(num_names, min(MOST_PER_PROCESSOR * num_names, MOST_BYTES // max(1, self._largest)))

    def _ask(self, name: str, source: list[object], position: LoaderPosition) -> torch.futures.Future[list[object]]:
        arguments = source, position.epoch, position.sample
        try:
            return rpc.rpc_async(name, processor.batch, arguments, timeout=self._ranks.timeout_s)
        except RpcError as error:
            raise out_of_reach("data processor", name, error) from error

    def _receive(self, name: str, answer: torch.futures.Future[list[object]], keys: tuple[str, ...]) -> JaggedBatch:
        try:
            with self._ranks.waiting(), span("wait for data"):
                plain = answer.wait()
        except RpcError as error:
            raise out_of_reach("data processor", name, error) from error
        size = num_bytes(plain)
        self._largest = max(size, self._largest or 0)
        self.num_bytes += size
        self._ranks.traffic.sent += size  # processors keep no account: what they send is the trainer's
        self._ranks.traffic.received += size
        return from_plain(plain, keys)


def _positions(loader: Loader) -> Iterator[LoaderPosition]:
    position = loader.position
    while True:
        yield position
        position = loader.after(position)
