"""Who a worker is, and numbers that no two workers ever give out twice."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and id, as in ``torch.distributed.rpc``.

    Attributes:
        name: unique among the living workers.
        id: likewise; the rank given to ``init_rpc``.
    """

    name: str
    id: int


class IdSource(Iterator[int]):
    """Integers below 2**63 that are unique over workers, incarnations and calls: a random start, then one by one.

    Two of ten thousand sources with a million numbers each meet with a probability below 1e-5.
    """

    def __init__(self) -> None:
        self._count = itertools.count(secrets.randbits(62))

    def __next__(self) -> int:
        return next(self._count)
