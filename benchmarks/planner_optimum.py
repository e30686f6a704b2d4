"""The least possible worst link of a few rows, by HiGHS in whole numbers.

The problem is that of :mod:`pibroch.planner.bound`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from pibroch.planner.bound import Case, program, scale


@dataclass(frozen=True, slots=True)
class Optimum:
    """What HiGHS found.

    Attributes:
        worst_link: of the best placement that it found.
        bound: below which none can be; equal to ``worst_link``, but for the solver's tolerance,
            when it came to its end.
        held: bool ``[K, W]``, which shards hold an item; ``None`` when it found none in time.
    """

    worst_link: float
    bound: float
    held: NDArray[np.bool_] | None


def optimum(case: Case, time_limit_s: float = 60.0) -> Optimum:
    """The least worst link, in whole copies and paths; for some tens of items.

    Blocks for ``time_limit_s`` at most.
    """
    num_items = len(case.weight)
    num_shards = len(case.room)
    goal, less, equal, room = program(case)
    num_x = num_items * num_shards * num_shards
    unit = scale(case)
    whole = np.concatenate([np.ones(num_x + num_items * num_shards), [0]])
    upper = np.concatenate([np.ones(num_x + num_items * num_shards), [np.inf]])
    solution = milp(
        goal,
        integrality=whole,
        bounds=Bounds(0, upper),
        constraints=[LinearConstraint(less, -np.inf, room), LinearConstraint(equal, 1, 1)],
        options={"time_limit": time_limit_s},
    )
    bound = 0.0 if solution.mip_dual_bound is None else float(solution.mip_dual_bound) * unit
    if solution.x is None:
        return Optimum(np.inf, bound, None)
    held = solution.x[num_x:-1].reshape(num_items, num_shards) > 0.5
    return Optimum(float(solution.fun) * unit, bound, held)
