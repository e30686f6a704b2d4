"""Closures that an optimizer evaluates more than once a step, as LBFGS does: each evaluation would update the rows.

Torch calls a hook before each step of any optimizer, which may put another closure in the place of the one that was given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pibroch.errors import TrainingError

_evaluations: list[int] = []
"""For each step that is evaluating its closure now, the outer ones first: how often it has."""


def check_first_evaluation() -> None:
    """Called where rows are to be updated.

    Raises:
        TrainingError: inside the second evaluation of a closure in one step.
    """
    if _evaluations and _evaluations[-1] > 1:
        raise TrainingError(
            "a closure that an optimizer evaluates again in one step, whose backward pass would update rows again",
            "one evaluation a step",
            "freeze the tables by requires_grad_(False) around optimizer.step(closure), or take an optimizer "
            "that evaluates once",
        )


def _count_evaluations(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if not callable(closure):
        return None
    counted = _counted(closure)
    if len(args) < 2:
        return args, {**kwargs, "closure": counted}
    return (args[0], counted, *args[2:]), kwargs


def _counted(closure: Callable[..., Any]) -> Callable[..., Any]:
    number = 0

    @wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        _evaluations.append(number)
        try:
            return closure(*args, **kwargs)
        finally:
            _evaluations.pop()

    return evaluate


register_optimizer_step_pre_hook(_count_evaluations)
