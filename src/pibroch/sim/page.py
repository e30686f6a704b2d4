"""Answers for readers: rows of tables for a terminal, one page with plots that works offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import EngFormatter

from pibroch.observability import plots, report
from pibroch.sim.sweep import Answer, Question

Grid = tuple[str, list[str], list[list[str]]]
COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, "#9333ea", "#be123c", "#0891b2", "#a16207")


def megabytes(number: float) -> str:
    """Bytes for a reader.

    >>> megabytes(1_234_567), megabytes(5.1e9)
    ('1.23 MB', '5.1 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B"


def thousands(number: float) -> str:
    """A rate for a reader.

    >>> thousands(11_338_000.0), thousands(1_234.0)
    ('11,338 k', '1.23 k')
    """
    return f"{number / 1e3:,.0f} k" if number >= 1e5 else f"{number / 1e3:.3g} k"


def milliseconds(seconds: float) -> str:
    """Of a step's part."""
    return f"{seconds * 1e3:,.3f}"


def saved(answer: Answer, thing: str) -> str:
    """Which share of a step twice of a thing saves."""
    if thing not in answer.helped_s:
        return "-"
    return f"{1 - answer.helped_s[thing] / answer.prediction.step_s:.0%}"


def tables(answers: Sequence[Answer]) -> list[Grid]:
    """A step's time, what its parts take, what would help, bytes, memory."""
    hosts = [f"{each.hosts:,}" for each in answers]
    whole = [
        [
            host,
            f"{each.ranks:,}",
            milliseconds(each.prediction.step_s),
            milliseconds(each.prediction.waiting_s),
            thousands(each.prediction.samples_per_second),
            megabytes(float(each.prediction.sent_bytes.mean())),
            megabytes(float(each.prediction.link_bytes.max())),
            megabytes(sum(each.memory_bytes.values())),
        ]
        for host, each in zip(hosts, answers, strict=True)
    ]
    names = list(dict.fromkeys(name for each in answers for name in each.prediction.parts_s))
    parts = [
        [name, *(milliseconds(each.prediction.parts_s.get(name, 0.0)) for each in answers)]
        for name in names
    ]
    kinds = list(dict.fromkeys(name for each in answers for name in each.memory_bytes))
    memory = [
        [name, *(megabytes(each.memory_bytes.get(name, 0.0)) for each in answers)] for name in kinds
    ]
    things = list(dict.fromkeys(name for each in answers for name in each.helped_s))
    helped = [
        [f"{thing} x 2", *(saved(each, thing) for each in answers)]
        for thing in sorted(things, key=lambda thing: answers[-1].helped_s.get(thing, math.inf))
    ]
    economy = [
        ["share of the time", *(f"{each.goodput:.1%}" for each in answers)],
        [
            "new samples/s",
            *(thousands(each.goodput * each.prediction.samples_per_second) for each in answers),
        ],
    ]
    if answers[0].price is not None:
        prices = (f"{each.price or 0:,.2f}" for each in answers)
        economy.append(["price of a billion samples", *prices])
    columns = [f"{host} hosts" for host in hosts]
    return [
        (
            f"A step of {answers[0].exchange}",
            [
                "hosts", "ranks", "ms a step", "ms waiting", "samples/s", "sent a rank",
                "worst link a step", "memory a rank",
            ],
            whole,
        ),
        ("The training thread's time, ms a step", ["part", *columns], parts),
        ("What would help: of a step's time is saved", ["with", *columns], helped),
        ("New samples, with what deaths cost", ["what", *columns], economy),
        ("Memory of the rank that takes most", ["what", *columns], memory),
    ]  # fmt: skip


def write_page(out: Path, recipe: str, question: Question, answers: Sequence[Answer]) -> Path:
    """Write one page: tables, and plots over the number of hosts.

    Raises:
        StorageError: when the page cannot be written.
    """
    figures = [
        ("Time of a step", "of the training thread, by what it does", _parts(answers)),
        (
            "Throughput",
            "of all ranks; dashed: as much a host as with the fewest",
            _throughput(answers),
        ),
        ("Bytes", "of payload that a host's link carries out a step, by host", _bytes(answers)),
    ]
    sentences = [
        f"{recipe}, {question.samples:,} samples a rank, {question.ranks_per_host} ranks a host,"
        f" links of {question.link}; costs of {question.machine.name}.",
        *dict.fromkeys(note for each in answers for note in each.notes),
    ]
    content = {
        "name": f"simulation of {recipe}",
        "tiles": [
            (f"{each.hosts:,} hosts, ms a step", milliseconds(each.prediction.step_s))
            for each in answers[:6]
        ],
        "sentences": sentences,
        "tables": tables(answers),
    }
    return report.write_page(out, "simulation", "--page", figures, content)


def _parts(answers: Sequence[Answer]) -> str:
    figure, axes = plots.new_axes("hosts", "ms a step")
    names = list(dict.fromkeys(name for each in answers for name in each.prediction.parts_s))
    largest = sorted(
        names, key=lambda name: -max(each.prediction.parts_s.get(name, 0.0) for each in answers)
    )[: len(COLOURS)]
    places = range(len(answers))
    below = [0.0] * len(answers)
    for name, colour in zip(largest, COLOURS, strict=False):
        heights = [1e3 * each.prediction.parts_s.get(name, 0.0) for each in answers]
        axes.bar(places, heights, 0.6, bottom=below, color=colour, label=name)
        below = [one + other for one, other in zip(below, heights, strict=True)]
    axes.set_xticks(list(places), [f"{each.hosts:,}" for each in answers])
    return plots.to_svg(figure, axes)


def _throughput(answers: Sequence[Answer]) -> str:
    figure, axes = plots.new_axes("hosts", "samples/s")
    hosts = [each.hosts for each in answers]
    rates = [each.prediction.samples_per_second for each in answers]
    axes.plot(hosts, rates, color=plots.GREEN, marker="o", markersize=4, label="predicted")
    even = [rates[0] * each / hosts[0] for each in hosts]
    axes.plot(hosts, even, color=plots.MUTED, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(EngFormatter())
    return plots.to_svg(figure, axes)


def _bytes(answers: Sequence[Answer]) -> str:
    figure, axes = plots.new_axes("hosts", "bytes a step")
    hosts = [each.hosts for each in answers]
    for values, colour, label in (
        ([float(each.prediction.link_bytes.mean()) for each in answers], plots.BLUE, "mean"),
        ([float(each.prediction.link_bytes.max()) for each in answers], plots.ORANGE, "worst"),
    ):
        axes.plot(hosts, values, color=colour, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    return plots.to_svg(figure, axes)
