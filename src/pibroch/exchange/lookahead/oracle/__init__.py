"""Who needs which row when, where it is and what must travel.

Plain objects: ids in, plans out; and a thread that keeps one.
"""

from pibroch.exchange.lookahead.oracle.joint import JointOracle
from pibroch.exchange.lookahead.oracle.oracle import (
    DESIGNS,
    Opening,
    Oracle,
    RowsOfRanks,
    StepPlan,
    early_steps,
)
from pibroch.exchange.lookahead.oracle.requests import PlanQueue, PlanRequest

__all__ = [
    "DESIGNS",
    "JointOracle",
    "Opening",
    "Oracle",
    "PlanQueue",
    "PlanRequest",
    "RowsOfRanks",
    "StepPlan",
    "early_steps",
]
