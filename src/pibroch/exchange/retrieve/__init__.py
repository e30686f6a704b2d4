"""Rows are read where they are: from shared memory within a host, by gets between hosts (OPER).

Training is that of ``alltoall``.
"""

from typing import Literal

from pibroch.config.exchange import OWNERS_POOL, PLACEMENTS, ExchangeSpec, PlacedSection


class RetrieveSection(PlacedSection):
    """Settings as for ``alltoall``, and which ranks share memory.

    Attributes:
        replicas: see there.
        hosts: number of each rank's host; ranks of one share memory. Detected when absent.
        assign: which rank trains which sample of a global batch: as the data have them
            (``given``), or where most of its rows are (``rows``).
    """

    name: Literal["retrieve"] = "retrieve"
    replicas: Literal["gather", "sparse", "dense"] = "gather"
    hosts: list[int] | None = None
    assign: Literal["given", "rows"] = "given"


SPEC = ExchangeSpec(
    "retrieve",
    "rows are read where they are: from shared memory within a host, by gets between hosts",
    RetrieveSection,
    "pibroch.exchange.retrieve.build:build",
    tuple(kind for kind in PLACEMENTS if kind not in OWNERS_POOL),
)
