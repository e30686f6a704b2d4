"""A trainer's way to data processors: what its loader would give, in its order, made elsewhere.

Who asks says everything, so what one that is lost had to make, another one makes, or its successor.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import cycle, islice

import torch

from pibroch import rpc
from pibroch.collectives import Ranks
from pibroch.data import EncodedDataset, JaggedBatch, Loader, LoaderPosition
from pibroch.errors import RpcError, UnknownWorkerError, WorkerLostError
from pibroch.observability.trace import span
from pibroch.processors import processor
from pibroch.processors.source import Plain, Source, from_plain, num_bytes
from pibroch.roles.losses import out_of_reach

logger = logging.getLogger(__name__)
_LOSSES = (WorkerLostError, UnknownWorkerError)
MOST_PER_PROCESSOR = 4
"""Batches under way from each."""
COME_BACK_S = 60.0
"""How long to wait for a successor where no processor is left."""
_LOOK_AGAIN_S = 1.0
"""How long one that is lost is not asked."""
_POLL_S = 0.1
MOST_BYTES = 256 << 20
"""Of batches under way to this trainer, as long as each processor has one to make."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A batch that is to come.

    Attributes:
        position: with which it begins.
        name: who makes it.
        answer: what will come.
    """

    position: LoaderPosition
    name: str
    answer: torch.futures.Future[Plain]


class Processors:
    """Data processors, as one trainer uses them.

    Of N, number p makes each N-th of its batches, beginning with the p-th.

    Args:
        names: of the processors, workers of this process's RPC group.
        ranks: whose traffic and waiting is counted.

    Attributes:
        num_bytes: that came from them so far.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks) -> None:
        self.names = tuple(names)
        self.num_bytes = 0
        self._ranks = ranks
        self._turns = cycle(self.names)
        self._lost_at: dict[str, float] = {}
        self._largest: int | None = None

    def batches(
        self, dataset: EncodedDataset, loader: Loader, num_batches: int
    ) -> Iterator[JaggedBatch]:
        """What ``loader`` would give from where it stands, over the ends of epochs.

        The loader itself does not move.

        Args:
            dataset: whose split the loader reads.
            loader: of this trainer.
            num_batches: how many.

        Raises:
            TrainingError: when all processors are lost and none comes back, or one does not answer
                for as long as collectives may wait.
            DataError: when a processor cannot read the dataset.
        """
        source = astuple(Source.of(dataset, loader))
        positions = islice(_positions(loader), num_batches)
        self._turns = cycle(self.names)
        under_way: deque[_Request] = deque()
        while True:
            for position in islice(positions, max(0, self._most() - len(under_way))):
                under_way.append(self._ask(self._next(), source, position))
            if not under_way:
                return
            plain = self._receive(under_way.popleft(), source)
            yield from_plain(plain, loader.split.keys)

    def _most(self) -> int:
        """Batches that may be under way."""
        num_names = len(self.names)
        if self._largest is None:
            return num_names
        return max(
            num_names, min(MOST_PER_PROCESSOR * num_names, MOST_BYTES // max(1, self._largest))
        )

    def _next(self) -> str:
        """Whose turn it is: of those that are not lost, or may have come back since."""
        for name in islice(self._turns, len(self.names)):
            if time.monotonic() - self._lost_at.get(name, -_LOOK_AGAIN_S) >= _LOOK_AGAIN_S:
                return name
        return next(self._turns)

    def _ask(self, name: str, source: tuple[object, ...], position: LoaderPosition) -> _Request:
        arguments = source, position.epoch, position.sample
        answer: torch.futures.Future[Plain]
        try:
            answer = rpc.rpc_async(name, processor.batch, arguments, timeout=self._ranks.timeout_s)
        except _LOSSES as error:
            answer = torch.futures.Future()
            answer.set_exception(error)  # type: ignore[arg-type]  # torch's annotation asks for a type variable
        except RpcError as error:
            raise out_of_reach("data processor", name, error) from error
        return _Request(position, name, answer)

    def _receive(self, request: _Request, source: tuple[object, ...]) -> Plain:
        deadline: float | None = None
        with self._ranks.waiting(), span("wait for data"):
            while True:
                try:
                    plain = request.answer.wait()
                    break
                except _LOSSES as error:
                    deadline = self._note_loss(request.name, error, deadline)
                    request = self._ask(self._next(), source, request.position)
                except RpcError as error:
                    raise out_of_reach("data processor", request.name, error) from error
        if self._lost_at.pop(request.name, None) is not None:
            logger.info("data processor %r is back", request.name)
        size = num_bytes(plain)
        self._largest = max(size, self._largest or 0)
        self.num_bytes += size
        self._ranks.traffic.sent += (
            size  # processors keep no account: what they send is the trainer's
        )
        self._ranks.traffic.received += size
        return plain

    def _note_loss(self, name: str, error: RpcError, deadline: float | None) -> float:
        """Another one is to be asked, until when; waits a little where none is left."""
        if name not in self._lost_at:
            logger.warning(
                "data processor %r is lost (%s): others do its work until it is back",
                name,
                error.got,
            )
        self._lost_at[name] = now = time.monotonic()
        deadline = deadline or now + COME_BACK_S
        if len(self._lost_at) == len(self.names):
            if now > deadline:
                raise out_of_reach("data processor", name, error) from error
            time.sleep(_POLL_S)
        return deadline


def _positions(loader: Loader) -> Iterator[LoaderPosition]:
    position = loader.position
    while True:
        yield position
        position = loader.after(position)
