"""An assignment on disk, with its prediction beside it.

``PLAN`` is a safetensors file (homes, copies, sources, the partition of each row by table: 2 bytes a row), ``PLAN.json`` the
prediction. :func:`save_plan` and :func:`load_plan` are all that the commands know of the form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pibroch.data.storage import storage_errors
from pibroch.embedding.tensor_file import write_tensors
from pibroch.errors import DataError
from pibroch.planner.assignment import Assignment
from pibroch.planner.prediction import Prediction

_HOME, _COPIES, _SOURCE, _ROWS = "home", "copies", "source", "partition_of/"


def prediction_path(path: Path) -> Path:
    """Where the prediction of a plan lies."""
    return path.with_name(path.name + ".json")


def save_plan(path: Path, assignment: Assignment, prediction: Prediction) -> None:
    """Write a plan and its prediction; the plan appears in one step, last.

    Raises:
        StorageError: when the disk refuses.
    """
    tensors: dict[str, NDArray[Any]] = {_HOME: assignment.home, _COPIES: assignment.copies.astype(np.uint8)}
    if assignment.source is not None:
        tensors[_SOURCE] = assignment.source
    tensors |= {_ROWS + name: rows for name, rows in assignment.partition_of.items()}
    temporary = path.with_name(path.name + ".new")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, tensors)
        prediction.save(prediction_path(path))
        temporary.replace(path)


def load_plan(path: Path) -> tuple[Assignment, Prediction]:
    """Read a plan and its prediction.

    Raises:
        DataError: when one of the two files is missing, cut short or of another kind.
    """
    need, do = "a plan made by `pibroch plan`", "check the path, or make the plan again"
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            if _HOME not in names or _COPIES not in names:
                raise DataError(f"{path}, a safetensors file of another kind", need, do)
            rows = {n.removeprefix(_ROWS): file.get_tensor(n) for n in names if n.startswith(_ROWS)}
            source = file.get_tensor(_SOURCE) if _SOURCE in names else None
            assignment = Assignment(rows, file.get_tensor(_HOME), file.get_tensor(_COPIES).astype(bool), source)
    except FileNotFoundError as error:
        raise DataError(f"{path}, which is not there", need, do) from error
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path}, cut short or no plan: {error}", need, do) from error
    return assignment, Prediction.load(prediction_path(path))
