"""The files of a run directory, as reports read them.

A stranger may have made them: what pages use of each is checked here, so that a page never meets
another form.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from pibroch.errors import InputError

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Milliseconds = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
Figures = dict[str, float | None]


class _RawIds(TypedDict):
    used: Count
    capacity: Count
    evictions: Count
    expiries: Count


class _RawIdsTotals(_RawIds):
    candidates: Count
    admissions: Count
    hit_rate: float | None


class _Training(TypedDict):
    step: Count
    loss: float
    samples_per_second: float
    raw_ids: NotRequired[dict[str, _RawIds] | None]


class _Evaluation(TypedDict):
    step: Count
    split: str
    auc: float | None
    logloss: float | None
    is_best: bool
    tasks: NotRequired[dict[str, Figures]]


class _Window(TypedDict):
    step: Count
    begin_ms: Milliseconds
    end_ms: Milliseconds
    auc: float | None
    calibration: float | None
    alarms: list[str]


class _Restart(TypedDict):
    time: str
    reason: str
    from_step: Count | None


class _Summary(TypedDict):
    samples_per_second: float
    peak_rss_bytes: Count
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    transfers_spared: NotRequired[float | None]
    raw_ids: NotRequired[dict[str, _RawIdsTotals] | None]


class _Curves(TypedDict):
    false_positive_rate: list[float]
    true_positive_rate: list[float]
    predicted: list[float]
    observed: list[float]


class _AccessSkew(TypedDict):
    row_share: list[float]
    access_share: list[float]


class _Tested(TypedDict, total=False):
    auc: float | None
    calibration: float | None
    tasks: dict[str, Figures]
    curves: _Curves
    best_possible_auc: float | None
    access_skew: _AccessSkew


class _Look(TypedDict):
    step: Count
    current: float
    fresh: float
    moved_to: str | None


class _Data(TypedDict, total=False):
    digest: str
    fingerprint: str
    samples: dict[str, Count]


_RECORDS: dict[str, Any] = {"training": _Training, "evaluation": _Evaluation, "window": _Window}


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What a run directory holds.

    Attributes:
        name: of the directory.
        config: the text of ``config.toml``.
        settings: what it says.
        versions: of the libraries.
        training, evaluations, windows: the records of ``metrics.jsonl``.
        restarts: the records of ``restarts.jsonl``.
        summary, evaluation: ``None`` while the run has not ended.
        plan_decay: looks at its plan, the last one last; empty where nobody looked.
        data: what it was trained on; ``None`` of runs that did not say.
    """

    name: str
    config: str
    settings: dict[str, Any]
    versions: dict[str, object]
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    restarts: list[dict[str, Any]]
    summary: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    plan_decay: Sequence[dict[str, Any]] = ()
    windows: Sequence[dict[str, Any]] = ()
    data: dict[str, Any] | None = None


def read_run(folder: Path) -> RunRecords:
    """Read a run directory, also of a run that is still going on.

    Raises:
        InputError: when it is none, or names the first of its files that is damaged.
    """
    if not (folder / "config.toml").is_file():
        raise InputError(
            f"{folder}, which holds no run", "a run directory", "name one that pibroch train made"
        )
    config, settings = _config(folder / "config.toml")
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _RECORDS}
    for place, record in enumerate(_lines(folder / "metrics.jsonl"), 1):
        kind = str(record.get("kind")) if isinstance(record, dict) else ""
        if kind not in records:
            where = f"line {place} of {folder / 'metrics.jsonl'}"
            raise _damaged(where, f"the kind is none of {', '.join(records)}")
        records[kind].append(_checked(record, _RECORDS[kind], folder / "metrics.jsonl"))
    restarts = folder / "restarts.jsonl"
    return RunRecords(
        name=folder.resolve().name,
        config=config,
        settings=settings,
        versions=_json(folder / "versions.json", dict[str, Any]) or {},
        training=records["training"],
        evaluations=[each for each in records["evaluation"] if each["split"] == "validation"],
        restarts=[_checked(each, _Restart, restarts) for each in _lines(restarts)],
        summary=_json(folder / "summary.json", _Summary),
        evaluation=_json(folder / "evaluation.json", _Tested),
        plan_decay=_json(folder / "plan_decay.json", list[_Look]) or (),
        windows=records["window"],
        data=_json(folder / "data.json", _Data),
    )


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _lines(path: Path) -> list[Any]:
    """Lines of JSON; the last one may be half written."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _json(path: Path, kind: Any) -> Any:
    """What a file of JSON says, ``None`` where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return None if content is None else _checked(content, kind, path)


def _checked(content: Any, kind: Any, path: Path) -> Any:
    """What was read, all of it, once the part that pages use is of this kind."""
    try:
        msgspec.convert(content, kind)
        return content
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _damaged(where: object, reason: object) -> InputError:
    return InputError(
        f"{where}, which is damaged: {reason}", "the file as it was written", "train again"
    )
