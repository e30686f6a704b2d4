"""One self-contained HTML page for a run: figures, plots, configuration, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pibroch.observability import plots
from pibroch.observability.records import UNWEIGHTED, figure
from pibroch.observability.run_files import RunRecords, read_run
from pibroch.storage import new_file

Figure = tuple[str, str, str]


def write_report(folder: Path, out: Path) -> Path:
    """Write the page of a run: one file that works offline.

    Raises:
        InputError: when the folder holds no run.
        StorageError: when the page cannot be written.
    """
    run = read_run(folder)
    content = {"name": run.name, "tiles": _tiles(run), "run": run, "raw_ids": _raw_ids(run)}
    return write_page(out, "run", "--out", _figures(run), content)


def write_page(
    out: Path, kind: str, option: str, figures: Sequence[Figure], content: Mapping[str, object]
) -> Path:
    """Write a page that needs no other file, by the template of its kind.

    Args:
        out: the file.
        kind: ``run``, ``comparison``, ``plan`` or ``simulation``.
        option: that names the file.
        figures: title, explanation and SVG of each.
        content: else, for the template.

    Raises:
        StorageError: when the page cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("pibroch.observability", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = shown_figure
    shown = [(title, note, Markup(svg)) for title, note, svg in figures]
    page = environment.get_template(f"{kind}.html").render(kind=kind, figures=shown, **content)
    with new_file(out, "a place to write to", f"pass {option} FILE") as file:
        file.write_text(page, encoding="utf-8")
    return out


def _figures(run: RunRecords) -> list[Figure]:
    """Title, explanation and SVG of each plot for which the run has data."""
    evaluation = run.evaluation or {}
    best_possible = evaluation.get("best_possible_auc")
    curves = evaluation.get("curves")
    figures: list[Figure] = []
    if run.training:
        loss = plots.loss_plot(run.training, run.evaluations)
        figures.append(("Loss", "mean binary cross-entropy, nats", loss))
    if run.evaluations:
        auc = plots.auc_plot(run.evaluations, best_possible)
        figures.append(("AUC", "of the validation split", auc))
    if run.windows:
        note = "of predictions before their step trained; calibration is 1 where it is right"
        figures.append(("Windows of event time", note, plots.windows_plot(run.windows)))
    if run.training:
        throughput = plots.throughput_plot(run.training)
        figures.append(("Throughput", "of training steps, evaluation left out", throughput))
    if any(record.get("raw_ids") for record in run.training):
        fill = plots.raw_ids_plot(run.training)
        figures.append(("Tables of raw ids", "all of them; evicted and expired ids a step", fill))
    if curves:
        roc = plots.roc_plot(curves, evaluation["auc"])
        figures.append(("ROC", "of the best model on the test split", roc))
        calibration = plots.calibration_plot(curves)
        figures.append(("Calibration", "points on the line are calibrated", calibration))
    if evaluation.get("access_skew", {}).get("row_share"):
        skew = plots.access_skew_plot(evaluation["access_skew"])
        figures.append(("Access skew", "of the training split, over all tables", skew))
    return figures


def _raw_ids(run: RunRecords) -> list[tuple[str, str]]:
    """Each table of raw ids as its name and what a reader wants of it, once the run has ended."""
    return [
        (
            table,
            f"{each['used']:,} of {each['capacity']:,} rows used, {each['candidates']:,} candidates"
            f"; ids with rows {figure(each['hit_rate'])}; {each['admissions']:,} admitted,"
            f" {each['evictions']:,} evicted, {each['expiries']:,} expired",
        )
        for table, each in ((run.summary or {}).get("raw_ids") or {}).items()
    ]


def _tiles(run: RunRecords) -> list[tuple[str, str]]:
    """Headline figures as label and text."""
    summary = run.summary
    evaluation = run.evaluation or {}
    if summary is None:
        step = run.training[-1]["step"] if run.training else 0
        return [("state", "not finished"), ("step", f"{step:,}")]
    throughput = [
        ("samples/s", f"{summary['samples_per_second']:,.0f}"),
        ("peak memory", f"{summary['peak_rss_bytes'] / 2**20:,.0f} MiB"),
    ]
    if evaluation and "auc" not in evaluation:
        return [("test AUC", "not evaluated"), *throughput]
    tiles = [("test AUC", figure(summary["auc"]))]
    if evaluation.get("best_possible_auc") is not None:
        tiles.append(("best possible AUC", figure(evaluation["best_possible_auc"])))
    first: Mapping[str, float | None] = next(iter((summary.get("tasks") or {}).values()), {})
    if f"auc{UNWEIGHTED}" in first:
        tiles.append(("test AUC, unweighted", figure(first[f"auc{UNWEIGHTED}"])))
    return [
        *tiles,
        ("logloss", figure(summary["logloss"])),
        ("normalised entropy", figure(summary["normalized_entropy"])),
        ("calibration", figure(evaluation.get("calibration"), 3)),
        *throughput,
        *_spared_tiles(summary),
        *_decay_tiles(run),
        *_alarm_tiles(run),
    ]


def _alarm_tiles(run: RunRecords) -> list[tuple[str, str]]:
    """How many windows were outside the recipe's bands."""
    if not run.windows:
        return []
    alarmed = sum(bool(record["alarms"]) for record in run.windows)
    return [("windows with an alarm", f"{alarmed:,} of {len(run.windows):,}")]


def _spared_tiles(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What assigning samples to ranks has spared."""
    share = summary.get("transfers_spared")
    return [] if share is None else [("transfers spared", f"{share:.1%}")]


def _decay_tiles(run: RunRecords) -> list[tuple[str, str]]:
    """How far the plan had decayed at the last look."""
    if not run.plan_decay:
        return []
    last = run.plan_decay[-1]
    moves = sum(look["moved_to"] is not None for look in run.plan_decay)
    ratio = last["current"] / last["fresh"] if last["fresh"] else 1.0
    return [
        ("plan, of a fresh one's cost", f"{ratio:.2f} at step {last['step']:,}"),
        ("plans since the first", f"{moves}"),
    ]


def shown_figure(value: object) -> str:
    """A value of a table: digits that mean something, thousands apart."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown_figure(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else "none" if value is None else str(value)
