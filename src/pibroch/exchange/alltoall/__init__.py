"""Synchronous hybrid parallelism.

Rows lie where a plan puts them and travel to the ranks whose samples need them.
"""

from typing import Literal

from pibroch.config.exchange import PLACEMENTS, ExchangeSpec, PlacedSection


class AllToAllSection(PlacedSection):
    """Settings that all exchanges between ranks share, and those of copied rows.

    Attributes:
        replicas: how gradients of rows that every rank has are summed; the sums are the same.
            ``gather`` suits a few rows, ``sparse`` many that are read often.
        assign: which rank trains which sample of a global batch: as the data have them
            (``given``), or where most of its rows are (``rows``).
    """

    name: Literal["alltoall"] = "alltoall"
    replicas: Literal["gather", "sparse", "dense"] = "gather"
    assign: Literal["given", "rows"] = "given"


SPEC = ExchangeSpec(
    "alltoall",
    "each rank holds a part of the rows; rows travel to the ranks that read them, gradients back",
    AllToAllSection,
    "pibroch.exchange.alltoall.build:build",
    PLACEMENTS,
)
