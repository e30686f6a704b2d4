"""What a run has sent from rank to rank, beside what its plan predicted."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pibroch.errors import DataError
from pibroch.planner.assignment import Assignment
from pibroch.planner.cost import Floats, links
from pibroch.planner.payload import payload_of_batches
from pibroch.planner.prediction import PlanPrediction


def measured_payload(run: Path, num_ranks: int) -> Floats:
    """Bytes that ranks of a run sent each other a step to exchange embeddings, ``[W, W]``.

    Args:
        run: its directory, with a summary.
        num_ranks: that it must have had.

    Raises:
        DataError: when it has not ended, or had other ranks.
    """
    path = run / "summary.json"
    try:
        sent = json.loads(path.read_text(encoding="utf-8")).get("bytes_by_link")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: {error}", "the directory of a run that has ended", "check --run"
        ) from error
    counted = np.array(sent if sent is not None else [], dtype=np.float64)
    if counted.shape != (num_ranks, num_ranks):
        raise DataError(
            f"{run}, whose summary counts the bytes of {len(counted)} ranks",
            f"a run of {num_ranks} ranks, as the plan has shards",
            "train with --ranks and `embedding.plan`, then pass that run",
        )
    return counted


def for_run(assignment: Assignment, prediction: PlanPrediction, run: Path) -> PlanPrediction:
    """The prediction with the payload of the run's batches and its way to sum gradients.

    Raises:
        DataError: for a plan that keeps too little of its profile, or one for inference.
    """
    if prediction.reads is None:
        raise DataError(
            "a plan that predicts no bytes of training steps",
            "one made with --mode training",
            "make it again",
        )
    config = _config(run)
    batch_size = _samples_per_step(config) / prediction.num_shards
    replicas = config.get("embedding", {}).get("exchange", {}).get("replicas", "gather")
    payload = payload_of_batches(
        assignment, prediction.reads, batch_size or prediction.batch_size, replicas
    )
    return prediction.model_copy(update={"payload_bytes": payload.tolist()})


def notes(prediction: PlanPrediction, plan: Path, run: Path) -> list[str]:
    """In words, what was predicted, and what sets the run apart from it."""
    config = _config(run)
    if not config:
        return ["the run's configuration cannot be read, so it may be of another plan"]
    exchange = config.get("embedding", {}).get("exchange", {})
    differences = []
    used = exchange.get("plan")
    if used is None or Path(used).resolve() != plan.resolve():
        differences.append(
            f"the run was placed by {used or exchange.get('placement', 'another rule')}"
        )
    if exchange.get("name") not in ("alltoall", "auto"):
        differences.append(f"its exchange is {exchange.get('name')}, predicted is alltoall")
    if exchange.get("wire", "float32") != "float32" or exchange.get("compress"):
        differences.append("its rows travel narrower than float32, which is predicted")
    batch_size = _samples_per_step(config) / prediction.num_shards
    if batch_size != prediction.batch_size:
        differences.append(
            f"predicted for the run's batches of {batch_size:g} samples a rank; "
            f"the plan was made for {prediction.batch_size}"
        )
    spared = _summary(run).get("transfers_spared")
    if spared is not None:
        differences.append(
            f"its samples were assigned by their rows, which spared {spared:.1%} of the transfers"
            " that their given order would take"
        )
    return differences


def _samples_per_step(config: Mapping[str, Any]) -> int:
    train = config.get("train", {})
    return int(train.get("batch_size", 0) * train.get("accumulate", 1))


def _summary(run: Path) -> dict[str, Any]:
    """A run in figures; nothing where they cannot be read."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _config(run: Path) -> dict[str, Any]:
    """What a run was configured with; nothing where that cannot be read."""
    try:
        return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


MEASURED_COLUMNS = ("bytes a step", "predicted", "measured", "measured over predicted")


def measured_rows(prediction: PlanPrediction, measured: Floats) -> list[list[str]]:
    """All links together, the dearest, and what each rank sends and gets.

    Each predicted (see :func:`for_run`) and measured.
    """
    predicted = np.array(prediction.payload_bytes)
    pairs = [
        ("all links", predicted.sum(), measured.sum()),
        ("dearest link", links(predicted).max(initial=0.0), links(measured).max(initial=0.0)),
    ]
    for rank in range(prediction.num_shards):
        pairs.append((f"rank {rank} sends", predicted[rank].sum(), measured[rank].sum()))
        pairs.append((f"rank {rank} gets", predicted[:, rank].sum(), measured[:, rank].sum()))
    return [
        [
            label,
            f"{first:,.0f}",
            f"{second:,.0f}",
            f"{second / first:.4f}" if first else "nothing predicted",
        ]
        for label, first, second in pairs
    ]
