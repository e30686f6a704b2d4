"""Reads where rows are: shared memory within a host, batched gets between hosts.

Training as ``alltoall`` does it (OPER).
"""

from typing import Literal

from pibroch.config.exchange import OWNERS_POOL, PLACEMENTS, ExchangeSpec, PlacedSection


class RetrieveSection(PlacedSection):
    """As for ``alltoall``, and who shares memory.

    Attributes:
        replicas: see there.
        hosts: number of each rank's host; ranks of one share memory. Found when absent.
    """

    name: Literal["retrieve"] = "retrieve"
    replicas: Literal["gather", "sparse", "dense"] = "gather"
    hosts: list[int] | None = None


SPEC = ExchangeSpec(
    "retrieve",
    "rows are read where they are: from shared memory within a host, by gets between hosts",
    RetrieveSection,
    "pibroch.exchange.retrieve.build:build",
    tuple(kind for kind in PLACEMENTS if kind not in OWNERS_POOL),
)
