"""Which item comes next: whole trainings of SASRec beside RecBole's, on ml-100k.

Both sides read the same events, leave the last two of each user out of training, have layers of the
same widths and stop by the same rule.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, stdev

from benchmarks.comparison import OURS, noise_note
from benchmarks.load import ForeignLoad
from benchmarks.next_item_case import TOP, NextItemCase
from benchmarks.next_item_runs import (
    Events,
    Trained,
    movielens,
    prepare_histories,
    train_pibroch,
    train_recbole,
    write_events,
)
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row

RECBOLE = "RecBole"
SEEDS = (1, 2, 3)
SPEED_BAR = 4.0
DEVIATIONS = 2
COLUMNS = [
    "model", "contender", "hr", "hr_by_seed", "ndcg", "ndcg_by_seed", "epochs", "seconds",
    "of_recbole",
]  # fmt: skip
PLOT = PlotSpec("seconds", ("model",), "model", "contender", "s of training", "quickest", "slowest")
QUICK_USERS = 100


@topic("next_item", "whole trainings of SASRec beside RecBole: hit rates and time")
def run(options: Options) -> Report:
    """Train on both sides in turn, a seed after the other."""
    load = ForeignLoad()
    options.say("preparing the data")
    events = movielens()
    case = NextItemCase()
    if options.quick:
        events = {user: events[user] for user in list(events)[:QUICK_USERS]}
        case = replace(case, epochs=2)
    dataset = prepare_histories(events, case.max_length, options.scratch / "histories")
    write_events(events, options.scratch)
    ours, theirs = [], []
    for seed in SEEDS[:2] if options.quick else SEEDS:
        one = replace(case, seed=seed)
        options.say(f"{OURS}, seed {seed}")
        ours.append(train_pibroch(one, dataset, options.scratch / f"run-{seed}"))
        options.say(f"{RECBOLE}, seed {seed}")
        theirs.append(train_recbole(one, options.scratch))
    notes = [*headlines(ours, theirs), *meanings(case, events), noise_note(load)]
    title = "SASRec on ml-100k in pibroch and in RecBole"
    origin = provenance() | theirs[0].versions
    return Report("next_item", title, rows_of(ours, theirs), COLUMNS, PLOT, notes, origin)


def rows_of(ours: list[Trained], theirs: list[Trained]) -> list[Row]:
    """A row for each side: means over seeds."""
    seconds = mean(each.seconds for each in theirs)
    rows = [_row(OURS, ours), _row(RECBOLE, theirs)]
    return [row | {"of_recbole": row["seconds"] / seconds} for row in rows]


def _row(contender: str, trained: list[Trained]) -> Row:
    seconds = [each.seconds for each in trained]
    return {
        "model": "SASRec",
        "contender": contender,
        "hr": mean(each.hr for each in trained),
        "hr_by_seed": ", ".join(f"{each.hr:.4f}" for each in trained),
        "ndcg": mean(each.ndcg for each in trained),
        "ndcg_by_seed": ", ".join(f"{each.ndcg:.4f}" for each in trained),
        "epochs": mean(each.epochs for each in trained),
        "seconds": mean(seconds),
        "quickest": min(seconds),
        "slowest": max(seconds),
    }


def headlines(ours: list[Trained], theirs: list[Trained]) -> list[str]:
    """What each bar says."""
    lines = []
    for name in ("hr", "ndcg"):
        here, there = ([getattr(each, name) for each in side] for side in (ours, theirs))
        least = mean(there) - DEVIATIONS * stdev(there)
        verdict = "holds" if mean(here) >= least else "missed"
        lines.append(
            f"**{name.upper()}@{TOP}: {mean(here):.4f} beside {mean(there):.4f}** (bar: at least"
            f" {least:.4f}, {DEVIATIONS} standard deviations below: {verdict})"
        )
    times = mean(each.seconds for each in theirs) / mean(each.seconds for each in ours)
    verdict = "holds" if times >= SPEED_BAR else "missed"
    lines.append(
        f"**training takes 1/{times:.1f} of {RECBOLE}'s time** (bar: 1/{SPEED_BAR:g}: {verdict})"
    )
    return lines


def meanings(case: NextItemCase, events: Events) -> list[str]:
    """What was trained, and what columns mean."""
    num_events = sum(map(len, events.values()))
    num_items = len({item for items in events.values() for item in items})
    return [
        (
            f"{num_events:,} events of {len(events):,} users with {num_items:,} items; of each user"
            " the last one is tested and the one before it validates, among all items, also those"
            " that the user had"
        ),
        (
            f"both sides: {case.blocks} block of attention with {case.heads} head over the last"
            f" {case.max_length} items, width {case.dim}, dropout {case.dropout:g}, Adam"
            f" {case.lr:g}, some {case.pairs:,} pairs of a history and its next item a step; after"
            f" {case.patience} epochs in a row without a better NDCG@{TOP} of validation the end;"
            " the best epoch's model is tested"
        ),
        (
            f"{RECBOLE} gives each pair a sequence of its own and takes the softmax over all items;"
            " pibroch computes a sequence once for all its positions (`all_positions`), each pair"
            " is met about twice an epoch, and takes it over the items of the batch, corrected by"
            " how frequent they are"
        ),
        "`seconds`: of all epochs that were trained, reading included, without evaluation",
        "means over seeds, which took turns",
    ]
