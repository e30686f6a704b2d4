"""A plan on disk with what it was predicted to cost."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pibroch.data.storage import storage_errors
from pibroch.errors import ConfigError
from pibroch.planner.assignment import Assignment
from pibroch.planner.plan import Plan
from pibroch.planner.prediction import Prediction

_PREDICTION = "prediction"


def save_plan(path: Path, assignment: Assignment, prediction: Prediction) -> None:
    """Write a plan that exchanges take, see :meth:`Plan.save`, with its prediction in it.

    Raises:
        ConfigError: for an assignment that cannot be.
        StorageError: when the disk refuses.
    """
    plan = Plan.by_rows(assignment, {_PREDICTION: prediction.model_dump(mode="json")})
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)


def load_plan(path: Path) -> tuple[Assignment, Prediction]:
    """Read a plan and its prediction.

    Raises:
        ConfigError: when it is missing, cut short or no plan of `pibroch plan`.
    """
    plan = Plan.load(path)
    try:
        prediction = Prediction.model_validate(plan.made_from[_PREDICTION])
    except (KeyError, ValidationError) as error:
        raise ConfigError(
            f"{path}, a plan without a prediction", "a plan made by `pibroch plan`", "make one"
        ) from error
    if plan.row_map is None:
        raise ConfigError(f"{path}, a plan that places no single rows", "a plan made by `pibroch plan`", "make one")
    return plan.row_map.assignment, prediction
