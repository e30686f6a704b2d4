"""A plan in figures and words: rows of tables for a terminal, one HTML page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pibroch.observability import plots, report
from pibroch.planner.cost import Floats, links
from pibroch.planner.measured import MEASURED_COLUMNS, measured_rows
from pibroch.planner.prediction import PlanPrediction

Row = list[str]


def megabytes(number: float) -> str:
    """Bytes for a reader.

    >>> megabytes(1_234_567), megabytes(12_345), megabytes(5.1e9), megabytes(0)
    ('1.23 MB', '12.3 kB', '5.1 GB', '0 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B"


def headlines(prediction: PlanPrediction) -> list[tuple[str, str]]:
    """What matters first, as label and text."""
    balance = prediction.balance
    cost = links(np.array(prediction.link_cost))
    bound = prediction.worst_link_bound
    lines = [
        ("crossing accesses", f"{prediction.crossing['accesses']:.2%}"),
        ("at least, by any choice of copies", f"{prediction.least_crossing:.2%}"),
        ("crossing transfers", f"{prediction.crossing['transfers']:.2%}"),
        (
            "worst link over mean",
            f"{cost.max() / cost.mean():.3f}" if len(cost) and cost.mean() else "no traffic",
        ),
    ]
    if bound:
        lines.append(("worst link over its lower bound", f"{cost.max() / bound:.4f}"))
    lines += [
        ("balance of memory", f"{balance['memory']:.4f}"),
        ("balance of lookups", f"{balance['workload']:.4f}"),
        ("balance of links", f"{balance['communication']:.4f}"),
        ("extra memory", _extra_memory(prediction)),
    ]
    return lines


def _extra_memory(prediction: PlanPrediction) -> str:
    """What copies take, of the budget.

    In small tables one partition may be more than a shard's part of it.
    """
    used = f"{prediction.used_extra:.2%}"
    budget = f"{prediction.extra:.2%}"
    is_more = prediction.used_extra > prediction.extra and used != budget
    rounded = ", rounded up to whole partitions of rows on each shard"
    return f"{used} of {budget}{rounded if is_more else ''}"


def sentences(prediction: PlanPrediction) -> list[str]:
    """What was decided, in words."""
    p = prediction
    how = {
        "links": (
            "copies relieve the worst link of the shard that has most free memory (Algorithm 1)"
        ),
        "everywhere": "the rows read most are on all shards",
        "frequency": (
            "rows read more often than BW_p2p / (B BW_ar) are on all shards (Eq. 4, 5); it counts"
            " accesses"
        ),
        "safe": "rows that every batch reads are on all shards: that never adds a byte",
        "none": "no copies",
    }
    sentences = [
        (
            f"{p.num_rows:,} rows ({megabytes(p.table_bytes)}) in {p.num_partitions:,} partitions"
            f" of at most {p.threshold:.3%} of accesses and memory, on {p.num_shards} shards of"
            f" {len(set(p.hosts))} host(s)"
        ),
        (
            f"for {p.mode}, by {p.objective}, batches of {p.batch_size:,} a rank; policy"
            f" {p.policy}: {how[p.policy]}"
        ),
        f"{p.copied_rows:,} rows have copies, {p.copies:,} in all ({p.hot_share:.2%} of the rows)",
    ]
    if p.mode == "training":
        forward = links(np.array(p.read_bytes["transfers"])).sum()
        sync = links(np.array(p.sync_bytes)).sum()
        sentences.append(
            f"a step moves {megabytes(forward)} of rows, and {megabytes(sync)} of gradients and"
            " sums, ids not counted"
        )
    return sentences + [f"warning: {warning}" for warning in p.warnings]


def shard_rows(prediction: PlanPrediction) -> list[Row]:
    """By shard: host, memory, lookups, bytes looked up, got and sent (transfers), dearest peer."""
    transfers = np.array(prediction.read_bytes["transfers"])
    cost = np.array(prediction.link_cost)
    np.fill_diagonal(transfers, 0.0)
    np.fill_diagonal(cost, 0.0)
    out = []
    for shard in range(prediction.num_shards):
        peer = int(cost[shard].argmax())
        dearest = "none" if not cost[shard, peer] else f"{peer} ({cost[shard, peer]:,.3g})"
        out.append(
            [
                str(shard),
                str(prediction.hosts[shard]),
                megabytes(prediction.memory_bytes[shard]),
                f"{prediction.lookups[shard]:,.0f}",
                megabytes(prediction.lookup_bytes[shard]),
                megabytes(transfers[shard].sum()),
                megabytes(transfers[:, shard].sum()),
                dearest,
            ]
        )
    return out


SHARD_COLUMNS = (
    "shard",
    "host",
    "memory",
    "lookups",
    "looked up",
    "gets",
    "gives",
    "dearest peer (cost)",
)
STEP_COLUMNS = ("extra memory", "crossing accesses", "mean link", "worst link", "mean of none")


def step_rows(prediction: PlanPrediction) -> list[Row]:
    """What each budget would buy, each cost beside that of no copies."""
    first = prediction.steps[0].mean_link if prediction.steps else 0.0
    return [
        [
            f"{step.extra:.0%}",
            f"{step.crossing:.1%}",
            f"{step.mean_link:,.4g}",
            f"{step.worst_link:,.4g}",
            f"{step.mean_link / first:.3f}" if first else "no traffic",
        ]
        for step in prediction.steps
    ]


POLICY_COLUMNS = (
    "policy",
    "copied rows",
    "mean link",
    "worst link",
    "rows cross",
    "gradients and sums cross",
)


def policy_rows(prediction: PlanPrediction) -> list[Row]:
    """What each policy would give; the chosen one is marked."""
    return [
        [
            f"{one.policy} (this plan)" if one.policy == prediction.policy else one.policy,
            f"{one.copied_rows:,}",
            f"{one.mean_link:,.4g}",
            f"{one.worst_link:,.4g}",
            megabytes(one.read_bytes),
            megabytes(one.sync_bytes),
        ]
        for one in prediction.policies
    ]


def write_page(
    prediction: PlanPrediction, name: str, out: Path, measured: Floats | None = None
) -> Path:
    """Write a page that needs no other file and asks the network for nothing.

    Args:
        prediction: to explain.
        name: of the plan.
        out: the file.
        measured: what a run sent from rank to rank a step, ``[W, W]``, to be shown beside.

    Raises:
        StorageError: when it cannot be written.
    """
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = []
    if measured is not None:
        tables.append(("Measured", MEASURED_COLUMNS, measured_rows(prediction, measured)))
    tables.append(("Shards", SHARD_COLUMNS, shard_rows(prediction)))
    if prediction.steps:
        tables.append(("Budgets", STEP_COLUMNS, step_rows(prediction)))
    if prediction.policies:
        tables.append(("Policies", POLICY_COLUMNS, policy_rows(prediction)))
    content = {
        "name": name,
        "tiles": headlines(prediction),
        "sentences": sentences(prediction),
        "tables": tables,
    }
    return report.write_page(out, "plan", "--html", _figures(prediction, measured), content)


def _figures(prediction: PlanPrediction, measured: Floats | None) -> list[tuple[str, str, str]]:
    p = prediction
    transfers, accesses = (np.array(p.read_bytes[form]) for form in ("transfers", "accesses"))
    for matrix in (transfers, accesses):
        np.fill_diagonal(matrix, 0.0)
    figures = [
        (
            "Memory",
            "of each shard, the dotted line is its budget",
            plots.shard_bars(p.memory_bytes, p.room_bytes),
        ),
        (
            "Lookups",
            "bytes that each shard looks up a step, for all ranks",
            plots.shard_bars(p.lookup_bytes),
        ),
        (
            "Bytes got",
            "from other shards a step, each distinct row once",
            plots.shard_bars(transfers.sum(axis=1).tolist()),
        ),
        (
            "Between shards, transfers",
            "bytes a step, each distinct row once",
            plots.heat_map(transfers.tolist()),
        ),
        (
            "Between shards, accesses",
            "bytes a step, each access once",
            plots.heat_map(accesses.tolist()),
        ),
        (
            "Cost of links",
            f"Eq. 3, {p.objective}: what was levelled",
            plots.heat_map(_off_diagonal(p.link_cost)),
        ),
        (
            "Access curve",
            "rows left of the line have copies",
            plots.access_curve(p.curve, p.hot_share),
        ),
    ]
    if any(any(row) for row in p.sync_bytes):
        figures.append(
            (
                "Gradients and sums",
                "bytes that a shard (row) sends another",
                plots.heat_map(p.sync_bytes),
            )
        )
    if measured is not None and p.payload_bytes is not None:
        note = "all bytes that a rank (row) sends another a training step"
        figures.append(("Predicted payload", note, plots.heat_map(p.payload_bytes)))
        figures.append(("Measured payload", note, plots.heat_map(measured.tolist())))
    if p.steps:
        series = [(step.extra, step.mean_link, step.worst_link) for step in p.steps]
        figures.append(
            (
                "Extra memory",
                "cost of links that each per cent buys",
                plots.budget_curve(series, p.extra),
            )
        )
    return figures


def _off_diagonal(matrix: list[list[float]]) -> list[list[float]]:
    return [
        [0.0 if i == j else value for j, value in enumerate(row)] for i, row in enumerate(matrix)
    ]
