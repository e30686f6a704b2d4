"""What training steps send to other ranks to exchange embeddings.

Evaluations and checkpoints are not theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pibroch.exchange.base import Exchange


class ExchangedBytes:
    """An account by rank, from now on.

    Args:
        exchange: that counts what it sends.
    """

    def __init__(self, exchange: Exchange[Any]) -> None:
        self._exchange = exchange
        self._others = self._sent()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the exchange sends meanwhile belongs to no step."""
        self._exchange.flush()  # what the last step sends is its own
        before = self._sent()
        try:
            yield
        finally:
            self._others += self._sent() - before

    def a_step(self, num_steps: int, world_size: int) -> list[float] | None:
        """Bytes to each rank, ``[W]``, over a number of steps; ``None`` where none were counted."""
        sent = self._sent() - self._others
        return (
            [round(sent[rank] / max(1, num_steps), 1) for rank in range(world_size)]
            if sent
            else None
        )

    def _sent(self) -> Counter[int]:
        return Counter(self._exchange.report().bytes_by_rank)
