"""One self-contained HTML page for several runs: curves, final figures, settings, data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pibroch.observability import plots
from pibroch.observability.report import Figure, shown_figure, write_page
from pibroch.observability.run_files import RunRecords

ABSENT = "none"
Metric = tuple[str, str]
"""A label and the name of a figure."""
_NAMES = {
    "auc": "AUC", "gauc": "GAUC", "logloss": "log loss", "normalized_entropy": "normalised entropy",
    "pr_auc": "PR-AUC", "rmse": "RMSE", "mae": "MAE",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run on the page.

    Attributes:
        name: that tells it from the others.
        records: of its directory.
        settings: its configuration, by keys with dots.
    """

    name: str
    records: RunRecords
    settings: Mapping[str, object]

    def validation(self) -> dict[Metric, list[tuple[int, float]]]:
        """Steps and values of each figure of the validation split."""
        series: dict[Metric, list[tuple[int, float]]] = {}
        records: Sequence[Mapping[str, Any]] = self.records.evaluations
        for record in records:
            for metric, value in _figures_of(record).items():
                if value is not None and plots.is_plotted(value):
                    series.setdefault(metric, []).append((record["step"], value))
        return series

    def kept(self) -> dict[Metric, float | None]:
        """Figures of the validation split of the best model so far."""
        best = [record for record in self.records.evaluations if record["is_best"]]
        return _figures_of(best[-1]) if best else {}

    def tested(self) -> dict[Metric, float | None]:
        """Figures of the test split; none before a run has ended, or without such samples."""
        evaluation = self.records.evaluation or {}
        return _figures_of(evaluation) if "auc" in evaluation else {}


def write_comparison(out: Path, runs: Sequence[ComparedRun]) -> Path:
    """Write the page of several runs: one file that works offline.

    Raises:
        StorageError: when the page cannot be written.
    """
    data = _data_sets(runs)
    final, changes = figures_and_settings(runs)
    versions = _rows([run.records.versions for run in runs])
    columns = ["", *(run.name for run in runs)]
    content = {
        "name": " · ".join(run.name for run in runs),
        "tiles": [
            ("runs", f"{len(runs)}"),
            ("data sets", f"{len(set(data))}"),
            ("settings that differ", f"{len(changes[1])}"),
        ],
        "sentences": _sentences(runs, data),
        "tables": [
            *((title, columns, rows) for title, rows in (final, changes)),
            ("Trained on", columns, _trained_on(runs, data)),
            ("Versions and machine", columns, versions),
        ],
    }
    return write_page(out, "comparison", "--out", _plots(runs, data), content)


def figures_and_settings(runs: Sequence[ComparedRun]) -> list[tuple[str, list[list[str]]]]:
    """What stands first on the page, as titles and rows.

    Each row is a name and a cell a run.
    """
    differing = _differing([run.settings for run in runs])
    return [
        ("Final figures", _final_figures(runs, _data_sets(runs))),
        ("Settings that differ", differing),
    ]


def plain_comparison(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """The page's figures and settings in values that JSON has, a list entry a run.

    Runs whose ``data_set`` is the same number have the same data.
    """
    differing = {key for key, *_ in _differing([run.settings for run in runs])}
    compared = [
        {
            "name": run.name,
            "data_set": number,
            "data": run.records.data,
            "is_finished": run.records.summary is not None,
            "steps": run.records.training[-1]["step"] if run.records.training else 0,
            "validation": _by_label(run.kept()),
            "test": _by_label(run.tested()),
            "settings": {key: value for key, value in run.settings.items() if key in differing},
        }
        for run, number in zip(runs, _data_sets(runs), strict=True)
    ]
    return {"runs": compared}


def _by_label(figures: Mapping[Metric, float | None]) -> dict[str, dict[str, float | None]]:
    nested: dict[str, dict[str, float | None]] = {}
    for (label, name), value in figures.items():
        nested.setdefault(label, {})[name] = value
    return nested


def _data_sets(runs: Sequence[ComparedRun]) -> list[int]:
    """The number of each run's data: the same for the same contents.

    Data of which a run says nothing are nobody else's.
    """
    numbers: dict[object, int] = {}
    keys = [(run.records.data or {}).get("digest", index) for index, run in enumerate(runs)]
    return [numbers.setdefault(key, len(numbers) + 1) for key in keys]


def _sentences(runs: Sequence[ComparedRun], data: Sequence[int]) -> list[str]:
    """What must be known before figures are compared."""
    sentences = []
    if len(set(data)) == 1:
        sentences.append("All runs have the same data, by the checksums of its files.")
    else:
        sentences.append(
            "These runs are not known to have the same data. Figures of one data set say nothing"
            " of those of another."
        )
    silent = [run.name for run in runs if run.records.data is None]
    if silent:
        sentences.append(
            f"Which data {', '.join(silent)} had is not recorded: counted as data of its own."
        )
    streams = [
        run.name for run in runs if any(key.startswith("data.stream.") for key in run.settings)
    ]
    if streams:
        sentences.append(f"Of {', '.join(streams)} the stream's events are not compared.")
    unfinished = [run.name for run in runs if run.records.summary is None]
    if unfinished:
        sentences.append(f"Not finished: {', '.join(unfinished)}.")
    return sentences


def _plots(runs: Sequence[ComparedRun], data: Sequence[int]) -> list[Figure]:
    """Title, explanation and SVG of the training loss and of each validation figure."""
    several = len(set(data)) > 1
    names = [
        f"{run.name} (data {number})" if several else run.name
        for run, number in zip(runs, data, strict=True)
    ]
    caution = "; different data: compare within one data set alone" if several else ""
    if len({_samples_per_step(run.settings) for run in runs}) > 1:
        caution += "; batch sizes differ, a step is not as many samples"
    figures: list[Figure] = []
    losses = [_points(run.records.training, "loss") for run in runs]
    if any(losses):
        kinds = {tuple(_loss(run.settings)) for run in runs}
        note = "smoothed, as each run minimises it"
        note += "; the losses differ: compare their course alone" if len(kinds) > 1 else ""
        svg = plots.runs_plot(names, losses, data, "training loss", is_noisy=True)
        figures.append(("Training loss", note + caution, svg))
    series = [run.validation() for run in runs]
    for metric in _metrics(series):
        title = _title(metric, _metrics(series))
        svg = plots.runs_plot(names, [each.get(metric, []) for each in series], data, title)
        figures.append((title, "of the validation split" + caution, svg))
    return figures


def _samples_per_step(settings: Mapping[str, Any]) -> int:
    return int(settings.get("train.batch_size", 0) * settings.get("train.accumulate", 1))


def _final_figures(runs: Sequence[ComparedRun], data: Sequence[int]) -> list[list[str]]:
    summaries = [run.records.summary or {} for run in runs]
    steps = [_cell(run.records.training[-1]["step"] if run.records.training else 0) for run in runs]
    rows = [["data", *(f"data {number}" for number in data)], ["steps", *steps]]
    for split, figures in (
        ("test", [run.tested() for run in runs]),
        ("validation", [run.kept() for run in runs]),
    ):
        metrics = _metrics(figures)
        for metric in metrics:
            cells = [_cell(each.get(metric, ABSENT)) for each in figures]
            rows.append([f"{split} {_title(metric, metrics)}", *cells])
    for key in ("samples", "seconds", "samples_per_second", "peak_rss_bytes"):
        cells = [_cell(summary.get(key, ABSENT)) for summary in summaries]
        rows.append([key.replace("_", " "), *cells])
    return rows


def _trained_on(runs: Sequence[ComparedRun], data: Sequence[int]) -> list[list[str]]:
    rows = [["data", *(f"data {number}" for number in data)]]
    known = [run.records.data or {} for run in runs]
    for key, name in (("digest", "contents"), ("fingerprint", "schema and vocabularies")):
        rows.append([name, *(each[key][:12] if key in each else ABSENT for each in known)])
    for split in ("train", "validation", "test"):
        cells = [_cell(each.get("samples", {}).get(split, ABSENT)) for each in known]
        rows.append([f"{split} samples", *cells])
    places = [{k: v for k, v in run.settings.items() if k.startswith("data.")} for run in runs]
    return rows + _rows(places)


def _rows(tables: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """A row for each key that any has."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [[key, *(_spelled(table.get(key, ABSENT)) for table in tables)] for key in keys]


def _differing(tables: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Those rows whose cells are not all alike."""
    return [row for row in _rows(tables) if len(set(row[1:])) > 1]


def _figures_of(record: Mapping[str, Any]) -> dict[Metric, float | None]:
    """Of an evaluation, by label and name; none of runs before there were several labels."""
    return {
        (label, name): value
        for label, figures in record.get("tasks", {}).items()
        for name, value in figures.items()
    }


def _metrics(figures: Sequence[Mapping[Metric, object]]) -> list[Metric]:
    """All that any run has."""
    return list(dict.fromkeys(metric for each in figures for metric in each))


def _title(metric: Metric, metrics: Sequence[Metric]) -> str:
    """A figure's name, with its label where there are several."""
    label, name = metric
    name = _NAMES.get(name, name)
    return name if len({each for each, _ in metrics}) == 1 else f"{name} of {label}"


def _loss(settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """The settings that say what is minimised."""
    return sorted(
        (key, str(value)) for key, value in settings.items() if key.startswith(("loss.", "tasks."))
    )


def _points(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(each["step"], each[name]) for each in records if plots.is_plotted(each[name])]


def _cell(value: object) -> str:
    """A figure as a report writes it."""
    return value if isinstance(value, str) else shown_figure(value)


def _spelled(value: object) -> str:
    """A setting or a version, all of its digits."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
