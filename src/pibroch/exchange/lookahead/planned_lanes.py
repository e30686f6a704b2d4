"""All that stands on where rows are.

Lanes, shards, carriers, and the way to an oracle that knows the homes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pibroch.embedding import Shard
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.lookahead.carrier import Carrier
from pibroch.exchange.lookahead.planners import Planner


@dataclass(frozen=True, slots=True)
class PlannedLanes:
    """Made anew when rows have moved.

    Attributes:
        lanes: one for each group of tables.
        shards: in this rank's care.
        carriers: of the lanes' records.
        planner: the way to the oracle.
    """

    lanes: Sequence[RowLane]
    shards: Sequence[Shard]
    carriers: Sequence[Carrier]
    planner: Planner
