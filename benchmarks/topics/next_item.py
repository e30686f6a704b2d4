"""Which item comes next: whole trainings beside RecBole's, on ml-100k.

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
    prepare_samples,
    train_pibroch,
    train_recbole,
    write_events,
)
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row

RECBOLE = "RecBole"
OURS_UNTIL = f"{OURS}, until that figure"
RECBOLE_UNTIL = f"{RECBOLE}, until its best epoch"
MODELS = {"sasrec": "SASRec", "two_tower": "Two towers"}
SEEDS = (1, 2, 3)
SPEED_BAR = 4.0
DEVIATIONS = 2
COLUMNS = [
    "contender", "hr", "hr_by_seed", "ndcg", "ndcg_by_seed", "epochs", "seconds",
    "of_recbole",
]  # fmt: skip
PLOT = PlotSpec("seconds", ("model",), "data", "contender", "s of training", "quickest", "slowest")
QUICK_USERS = 100


@topic(
    "next_item",
    "whole trainings beside RecBole: hit rates and time",
    sections=list(MODELS),
    quick_sections=["sasrec"],
)
def run(options: Options) -> Report:
    """Train a model on both sides in turn, a seed after the other."""
    load = ForeignLoad()
    options.say("preparing the data")
    events = movielens()
    case = NextItemCase(options.section)
    if options.quick:
        events = {user: events[user] for user in list(events)[:QUICK_USERS]}
        case = replace(case, epochs=2)
    scratch = options.scratch / options.section
    dataset = prepare_samples(events, case, scratch / "samples")
    write_events(events, scratch)
    ours: list[Trained] = []
    theirs: list[Trained] = []
    ours_until: list[Trained] = []
    for seed in SEEDS[:2] if options.quick else SEEDS:
        one = replace(case, seed=seed)
        options.say(f"{OURS}, seed {seed}")
        ours.append(train_pibroch(one, dataset, scratch / f"run-{seed}"))
        options.say(f"{RECBOLE}, seed {seed}")
        theirs.append(train_recbole(one, scratch))
        epochs = ours[-1].epochs_until(max(theirs[-1].validation))
        if epochs is not None:
            options.say(f"{OURS}, seed {seed}, {epochs} epochs")
            again = replace(one, epochs=epochs)
            ours_until.append(train_pibroch(again, dataset, scratch / f"run-{seed}-until"))
    lines = headlines(ours, theirs, ours_until)
    notes = [*lines, *meanings(case, events), noise_note(load)]
    title = f"{MODELS[options.section]} on ml-100k in pibroch and in RecBole"
    origin = provenance() | theirs[0].versions
    rows = [
        {"model": MODELS[options.section], "data": "ml-100k", **row}
        for row in rows_of(ours, theirs, ours_until)
    ]
    return Report("next_item", title, rows, COLUMNS, PLOT, notes, origin)


def rows_of(ours: list[Trained], theirs: list[Trained], ours_until: list[Trained]) -> list[Row]:
    """Rows of both sides by their own ends, and by the figure of RecBole's best epochs.

    The latter where all seeds came to it.
    """
    pairs = [(OURS, ours, RECBOLE, theirs)]
    if len(ours_until) == len(theirs):
        theirs_until = [each.until_best() for each in theirs]
        pairs.append((OURS_UNTIL, ours_until, RECBOLE_UNTIL, theirs_until))
    rows = []
    for our_name, here, their_name, there in pairs:
        pair = _row(our_name, here), _row(their_name, there)
        rows += [row | {"of_recbole": row["seconds"] / pair[1]["seconds"]} for row in pair]
    return rows


def _row(contender: str, trained: list[Trained]) -> Row:
    seconds = [sum(each.seconds) for each in trained]
    return {
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


def headlines(ours: list[Trained], theirs: list[Trained], ours_until: list[Trained]) -> list[str]:
    """What each bar says."""
    lines = [*_figures("", ours, theirs), _speed("training takes", ours, theirs)]
    if len(ours_until) < len(theirs):
        return [*lines, f"not all seeds reached {RECBOLE}'s best NDCG@{TOP} of validation"]
    theirs_until = [each.until_best() for each in theirs]
    reached = f"{RECBOLE}'s best NDCG@{TOP} of validation is reached in"
    lines.append(_speed(reached, ours_until, theirs_until))
    return [*lines, *_figures("ended there, ", ours_until, theirs)]


def _figures(when: str, ours: list[Trained], theirs: list[Trained]) -> list[str]:
    lines = []
    for name in ("hr", "ndcg"):
        here, there = ([getattr(each, name) for each in side] for side in (ours, theirs))
        least = mean(there) - DEVIATIONS * stdev(there)
        verdict = "holds" if mean(here) >= least else "missed"
        lines.append(
            f"**{when}{name.upper()}@{TOP}: {mean(here):.4f} beside {mean(there):.4f}** (bar: at"
            f" least {least:.4f}, {DEVIATIONS} standard deviations below: {verdict})"
        )
    return lines


def _speed(what: str, ours: list[Trained], theirs: list[Trained]) -> str:
    times = mean(sum(each.seconds) for each in theirs) / mean(sum(each.seconds) for each in ours)
    verdict = "holds" if times >= SPEED_BAR else "missed"
    return f"**{what} 1/{times:.1f} of {RECBOLE}'s time** (bar: 1/{SPEED_BAR:g}: {verdict})"


def meanings(case: NextItemCase, events: Events) -> list[str]:
    """What was trained, and what columns mean."""
    num_events = sum(map(len, events.values()))
    num_items = len({item for items in events.values() for item in items})
    of_model = [
        (
            f"both sides: {case.blocks} block of attention with {case.heads} head over the last"
            f" {case.max_length} items; items that a user had are candidates, too"
        ),
        (
            f"{RECBOLE} gives each pair a sequence of its own and takes the softmax over all items;"
            " pibroch computes a sequence once for all its positions (`all_positions`), each pair"
            " is met about twice an epoch, and takes it over the items of the batch, corrected by"
            " how frequent they are"
        ),
    ]
    if case.model == "two_tower":
        of_model = [
            (
                "both sides: of a user's and an item's id a hidden layer and a vector, compared by"
                " their cosine; items that a user had in training or validation are no candidates"
            ),
            (
                f"{RECBOLE}'s DSSM learns to tell each item that a user had from one that he had"
                " not; pibroch takes the softmax over the items of the batch, corrected by how"
                " frequent they are"
            ),
        ]
    return [
        (
            f"{num_events:,} events of {len(events):,} users with {num_items:,} items; of each user"
            " the last one is tested and the one before it validates, on both sides among all"
            f" {num_items:,} items, those that training never saw among them"
        ),
        (
            f"both sides: width {case.dim}, dropout {case.dropout:g}, Adam {case.lr:g}, some"
            f" {case.pairs:,} pairs a step; after {case.patience} epochs in a row without a better"
            f" NDCG@{TOP} of validation the end; the best epoch's model is tested"
        ),
        *of_model,
        "`seconds`: of all epochs that were trained, reading included, without evaluation",
        (
            f"`{OURS_UNTIL}`: trained anew, for as many epochs as that seed took to the NDCG@{TOP}"
            f" of validation of {RECBOLE}'s best epoch; {RECBOLE}'s without the epochs after it"
        ),
        "means over seeds, which took turns",
    ]
