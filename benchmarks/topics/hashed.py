"""Tables of raw ids.

``index``: the index alone, an id to its row, with ids that come and go; beside a dictionary of
Python's that does the same. ``step`` and ``hosts``: training over such tables beside fixed ones.
``drift``: see :mod:`benchmarks.hashed_drift`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks.comparison import noise_note
from benchmarks.contender import CHECKOUT, BenchmarkError
from benchmarks.environments import peers_python
from benchmarks.hashed_drift import drift
from benchmarks.hashed_training import hosts_report, step_report
from benchmarks.load import ForeignLoad
from benchmarks.plots import OURS, PlotSpec
from benchmarks.provenance import provenance
from benchmarks.raw_id_stream import BATCH_IDS, HOT_IDS, HOT_POOL, NEW_IDS, Stream
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from pibroch.embedding import Hashed, HashedIndex
from pibroch.errors import MissingDependencyError, PibrochError
from pibroch.kernels.arrays import Ints

TURNOVERS = 10
MEASURED_STEPS = 400  # of ours: some six evictions
DICTIONARY = "Python dictionary"
TORCHREC = "TorchRec"
SMALLER = 5  # others have one in so many of our rows: they sort them
PEER_TIMEOUT_S = 900.0
COLUMNS = [
    "contender", "rows", "when", "mean_ns", "p50_ns", "p80_ns", "longest_ms", "search_p99",
    "bytes_per_row", "shared_rows",
]  # fmt: skip
PLOT = PlotSpec("mean_ns", ("rows",), "when", "contender", "ns an id")
MEANINGS = (
    (
        f"a step learns {BATCH_IDS:,} ids and looks up their rows: {HOT_IDS:,} distinct ones of"
        f" {HOT_POOL:,}, and {NEW_IDS:,} that were never there before; one thread"
    ),
    (
        "`mean_ns` an id is over all steps, those included in which a sixteenth of the rows is"
        " evicted (`longest_ms`); `p50_ns` and `p80_ns` over steps"
    ),
    (
        "TorchRec: `MCHManagedCollisionModule`, which evicts every tenth step;"
        " `shared_rows`: of a step's distinct ids so many have no row of their own. Its hash table,"
        " FBGEMM's, learns on GPUs alone"
    ),
    (
        f"`turned over {TURNOVERS} times`: after so many times as many new ids as there are rows;"
        " `search_p99`: slots that a search reads, 99 of 100 no more"
    ),
)


class Contender(Protocol):
    """An index."""

    def learn_rows(self, ids: Ints) -> tuple[object, Ints]:
        """See :class:`pibroch.embedding.LearningIndex`."""


class DictionaryIndex:
    """Least recent ids leave, as many at once as of ours."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[int, list[int]] = {}
        self._free = list(range(capacity))[::-1]
        self._step = 0

    def learn_rows(self, ids: Ints) -> tuple[object, Ints]:
        """See :class:`Contender`."""
        self._step += 1
        numbers = ids.tolist()
        new = set()
        for id_ in numbers:
            entry = self._entries.get(id_)
            if entry is None:
                new.add(id_)
            else:
                entry[1] = self._step
        evicted = self._evict(len(new))
        for id_ in sorted(new):
            self._entries[id_] = [self._free.pop(), self._step]
        return evicted, np.array([self._entries[id_][0] for id_ in numbers], np.int64)

    def _evict(self, num: int) -> list[int]:
        if num <= len(self._free):
            return []
        old = [(last, id_) for id_, (_, last) in self._entries.items() if last != self._step]
        leaving = sorted(old)[: num - len(self._free) + self._capacity // 16]
        evicted = {self._entries.pop(id_)[0]: id_ for _, id_ in leaving}
        self._free = sorted([*self._free, *evicted], reverse=True)
        return [evicted[row] for row in sorted(evicted)]


@topic(
    "hashed",
    "tables of raw ids: the index, beside a dictionary; training; AUC where ids come and go",
    sections=["index", "step", "hosts", "drift"],
    quick_sections=["index"],
)
def run(options: Options) -> Report:
    """Measure a section."""
    if options.section == "step":
        return step_report(options)
    if options.section == "hosts":
        return hosts_report(options)
    if options.section == "drift":
        return drift(options)
    load = ForeignLoad()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = index_rows(options)
    finally:
        torch.set_num_threads(threads)
    notes = [agreement(), noise_note(load), *MEANINGS]
    return Report("hashed", "An index of raw ids", rows, COLUMNS, PLOT, notes, provenance())


def agreement() -> str:
    """Have both learn the same ids.

    Raises:
        PibrochError: when they differ.
    """
    stream = Stream(1)
    ours = Hashed().index(60_000)
    theirs = DictionaryIndex(60_000)
    for step in range(30):
        ids = stream.batch()
        changes, rows = ours.learn_rows(ids)
        evicted, their_rows = theirs.learn_rows(ids)
        if changes.evicted_ids.tolist() != evicted or not np.array_equal(rows, their_rows):
            raise PibrochError(f"other rows than the dictionary's in step {step}", "the same")
    return "30 steps with 60,000 rows: the same rows and the same evicted ids as the dictionary's"


def index_rows(options: Options) -> list[Row]:
    """A row for each contender and time of its life."""
    num_rows = 200_000 if options.quick else 10_000_000
    steps = MEASURED_STEPS // 4 if options.quick else MEASURED_STEPS
    rows = []
    index = Hashed().index(num_rows)
    stream = Stream(0)
    for turnovers in (1, TURNOVERS):
        while admissions(index) < turnovers * num_rows or not index.counters()["evictions"]:
            options.say(f"turnover {1 + admissions(index) // num_rows}")
            index.learn(stream.batch())
        rows.append(
            {
                "contender": OURS,
                "rows": num_rows,
                "when": when(turnovers),
                **timed(index, stream.batch, steps),
                "search_p99": index.longest_search(0.99),
                "bytes_per_row": index.counters()["bytes"] / num_rows,
            }
        )
    del index
    options.say("the dictionary")
    fewer = num_rows // SMALLER
    dictionary = DictionaryIndex(fewer)
    for _ in range(0, fewer, NEW_IDS):
        dictionary.learn_rows(stream.new(NEW_IDS))
    figures = timed(dictionary, stream.batch, max(10, fewer // 16 // NEW_IDS + 1))
    rows.append({"contender": DICTIONARY, "rows": fewer, "when": when(1), **figures})
    try:
        python = peers_python()
    except MissingDependencyError as error:
        options.say(f"{TORCHREC} is left out: {error}")
        return rows
    options.say(TORCHREC)
    figures = torchrec(python, fewer, steps)
    return [*rows, {"contender": TORCHREC, "rows": fewer, "when": when(1), **figures}]


def torchrec(python: Path, num_rows: int, steps: int) -> Row:
    """What TorchRec's tables take, in a process of their own.

    Raises:
        BenchmarkError: when it fails.
    """
    words = ["-m", "benchmarks.workers.collisions_torchrec", str(num_rows), str(steps)]
    done = subprocess.run(
        [str(python), "-W", "ignore", *words],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=PEER_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"{TORCHREC}: {done.stderr[-2000:]}")
    figures: Row = json.loads(done.stdout)
    return {name: figure for name, figure in figures.items() if name in COLUMNS}


def admissions(index: HashedIndex) -> int:
    """So far."""
    return index.counters()["admissions"]


def when(turnovers: int) -> str:
    """In the life of an index."""
    return "full" if turnovers == 1 else f"turned over {turnovers} times"


def timed(index: Contender, batch: Callable[[], Ints], steps: int) -> Row:
    """Nanoseconds an id of so many steps, in which it lies where it lay."""
    taken = []
    for _ in range(steps):
        ids = batch()
        begin = time.perf_counter_ns()
        index.learn_rows(ids)
        taken.append((time.perf_counter_ns() - begin) / len(ids))
    return {
        "mean_ns": float(np.mean(taken)),
        "p50_ns": float(np.percentile(taken, 50)),
        "p80_ns": float(np.percentile(taken, 80)),
        "longest_ms": max(taken) * BATCH_IDS / 1e6,
    }
