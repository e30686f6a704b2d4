"""A plan on disk with what it was predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pibroch.embedding import Table
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Array
from pibroch.planner.assignment import Assignment
from pibroch.planner.payload import partition_reads, step_payload
from pibroch.planner.plan import Plan, rows_path
from pibroch.planner.prediction import PlanPrediction
from pibroch.planner.profile import AccessProfile
from pibroch.planner.row_map_file import open_array
from pibroch.storage import storage_errors

_PREDICTION = "prediction"
_READ_BYTES = "read_bytes"
_MATRICES = ("link_cost", "sync_bytes", "payload_bytes")


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
    content, arrays = _without_matrices(prediction)
    plan = plan.model_copy(update={"made_from": {_PREDICTION: content}})
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path, arrays)
    return prediction


def load_plan(path: Path) -> tuple[Assignment, PlanPrediction]:
    """Read a plan and its prediction.

    Raises:
        ConfigError: when it is missing, cut short or no plan of `pibroch plan`.
    """
    plan = Plan.load(path)
    if plan.row_map is None:
        raise ConfigError(
            f"{path}, a plan that places no single rows",
            "a plan made by `pibroch plan`",
            "make one",
        )
    try:
        prediction = _with_matrices(plan.made_from[_PREDICTION], rows_path(path))
    except (KeyError, ValidationError) as error:
        raise ConfigError(
            f"{path}, a plan without a prediction", "a plan made by `pibroch plan`", "make one"
        ) from error
    return plan.row_map.assignment, prediction


def _without_matrices(prediction: PlanPrediction) -> tuple[dict[str, Any], dict[str, Array]]:
    """A prediction for the plan's JSON, and its ``[W, W]`` for the file of rows beside it.

    As text they would be 100 MB for 1,024 shards.
    """
    content = prediction.model_dump(mode="json")
    matrices = {name: content.pop(name) for name in _MATRICES}
    matrices |= {f"{_READ_BYTES}.{form}": matrix for form, matrix in content[_READ_BYTES].items()}
    content[_READ_BYTES] = dict.fromkeys(content[_READ_BYTES])
    arrays = {
        f"{_PREDICTION}.{name}": np.array(matrix, np.float64)
        for name, matrix in matrices.items()
        if matrix is not None
    }
    return content, arrays


def _with_matrices(content: Any, path: Path) -> PlanPrediction:
    """The prediction in a plan's JSON; plans of before hold their matrices in it, too."""
    if not isinstance(content, dict):
        return PlanPrediction.model_validate(content)
    content = dict(content)
    for name in _MATRICES:
        if name not in content and (array := open_array(path, f"{_PREDICTION}.{name}")) is not None:
            content[name] = array.tolist()
    if isinstance(forms := content.get(_READ_BYTES), dict):
        arrays = {form: open_array(path, f"{_PREDICTION}.{_READ_BYTES}.{form}") for form in forms}
        filled = {form: array.tolist() for form, array in arrays.items() if array is not None}
        content[_READ_BYTES] = forms | filled
    return PlanPrediction.model_validate(content)
