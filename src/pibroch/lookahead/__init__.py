"""Who needs which row when, where it is and what must travel.

Plain objects: ids in, plans out; and a thread that keeps one.
"""

from pibroch.lookahead.early_steps import early_steps
from pibroch.lookahead.joint import JointOracle
from pibroch.lookahead.oracle import DESIGNS, Opening, Oracle, StepPlan
from pibroch.lookahead.requests import PlanQueue, PlanRequest

__all__ = [
    "DESIGNS",
    "JointOracle",
    "Opening",
    "Oracle",
    "PlanQueue",
    "PlanRequest",
    "StepPlan",
    "early_steps",
]
