"""Where rows live: plans, and later what makes them."""

from pibroch.planner.plan import KINDS, Placement, Plan

__all__ = ["KINDS", "Placement", "Plan"]
