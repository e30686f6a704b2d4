"""Where rows live: plans, and later what makes them."""

from pibroch.planner.plan import Placement, Plan

__all__ = ["Placement", "Plan"]
