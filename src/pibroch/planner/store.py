"""A plan on disk with what it was predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from pibroch.data.storage import storage_errors
from pibroch.embedding import Table
from pibroch.errors import ConfigError
from pibroch.planner.assignment import Assignment
from pibroch.planner.payload import partition_reads, step_payload
from pibroch.planner.plan import Plan
from pibroch.planner.prediction import PlanPrediction
from pibroch.planner.profile import AccessProfile

_PREDICTION = "prediction"


def save_plan(
    path: Path,
    assignment: Assignment,
    prediction: PlanPrediction,
    tables: Sequence[Table] = (),
    profile: AccessProfile | None = None,
) -> PlanPrediction:
    """Write a plan that exchanges take, see :meth:`Plan.save`, with its prediction in it.

    Args:
        path: of the plan.
        assignment: what was decided.
        prediction: what it costs.
        tables: that it places, for the payload of each link; not predicted without.
        profile: of the same tables, needed with them.

    Returns:
        The prediction as it was written.

    Raises:
        ConfigError: for an assignment that cannot be.
        StorageError: when the disk refuses.
    """
    plan = Plan.by_rows(assignment)
    if tables and profile is not None:
        trains = prediction.mode == "training"
        payload = step_payload(
            plan, tables, profile, trains=trains, batch_size=prediction.batch_size
        )
        reads = partition_reads(assignment, tables, profile) if trains else None
        update = {"payload_bytes": payload.tolist(), "reads": reads}
        prediction = prediction.model_copy(update=update)
    plan = plan.model_copy(update={"made_from": {_PREDICTION: prediction.model_dump(mode="json")}})
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    return prediction


def load_plan(path: Path) -> tuple[Assignment, PlanPrediction]:
    """Read a plan and its prediction.

    Raises:
        ConfigError: when it is missing, cut short or no plan of `pibroch plan`.
    """
    plan = Plan.load(path)
    try:
        prediction = PlanPrediction.model_validate(plan.made_from[_PREDICTION])
    except (KeyError, ValidationError) as error:
        raise ConfigError(
            f"{path}, a plan without a prediction", "a plan made by `pibroch plan`", "make one"
        ) from error
    if plan.row_map is None:
        raise ConfigError(
            f"{path}, a plan that places no single rows",
            "a plan made by `pibroch plan`",
            "make one",
        )
    return plan.row_map.assignment, prediction
