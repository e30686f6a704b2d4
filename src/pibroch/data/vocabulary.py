"""The counting pass: for each table with a vocabulary what it is and how often rows are read.

It takes one table at a time over the spool; one whose counts are on disk is done. Memory is
bounded: sorted runs of codes spill to disk and are merged by ranges of codes. Codes are 64-bit
hashes, so equal ranges hold about equally many of them, and each range is merged on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.data.counted import Counted, merged
from pibroch.data.kernels.text import EMPTY_CODE
from pibroch.data.schema import CategoricalFeature
from pibroch.data.splits import TRAIN, SplitRule
from pibroch.data.spool import Spool
from pibroch.data.transform import FIRST_ROW, MISSING_ROW, UNKNOWN_ROW
from pibroch.data.writer import write_table
from pibroch.storage import storage_errors

_UINT64_RANGE = 1 << 64
_NO_CODES = Counted(np.empty(0, np.uint64), np.empty(0, np.int64))


def count_table(spool: Spool, table: str, split: SplitRule, work: Path, memory_codes: int) -> int:
    """Write the vocabulary of one table below ``work/dataset`` unless it is there; its rows.

    All features that read it count.

    Args:
        spool: all pieces.
        table: the name of the feature that has it.
        split: says which samples train.
        work: holds ``dataset`` and ``runs``.
        memory_codes: see :class:`CodeCounter`.
    """
    schema = spool.schema
    readers = [schema.keys.index(name) for name in schema.readers[table]]
    feature = schema.categorical[readers[0]]
    path = work / "dataset" / "tables" / f"{feature.name}.counts.i64"
    if not path.exists():
        pieces = _train_codes(spool, readers, split)
        codes, counts = _vocabulary(feature, pieces, CodeCounter(work / "runs", memory_codes))
        write_table(work / "dataset", feature.name, counts, codes)
    return path.stat().st_size // np.dtype(np.int64).itemsize


def _train_codes(
    spool: Spool, feature_ids: Sequence[int], split: SplitRule
) -> Iterator[NDArray[np.uint64]]:
    """Codes of some features over the training split, piece by piece."""
    first = 0
    for number, piece in enumerate(spool.pieces):
        in_train = split.assign(first, piece.num_records, spool.num_records) == TRAIN
        first += piece.num_records
        for feature_id in feature_ids if in_train.any() else ():
            codes = spool.codes_of(number, feature_id)
            yield codes.values[
                in_train if codes.lengths is None else np.repeat(in_train, codes.lengths)
            ]


def _vocabulary(
    feature: CategoricalFeature, pieces: Iterator[NDArray[np.uint64]], counter: CodeCounter
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Codes of rows 2, 3, ... by falling count, and accesses of all rows."""
    num_missing = num_all = 0
    for codes in pieces:
        present = codes[codes != EMPTY_CODE]
        num_all += len(codes)
        num_missing += len(codes) - len(present)
        counter.add(present)
    max_codes = None if feature.max_rows is None else feature.max_rows - FIRST_ROW
    kept, kept_counts = counter.most_frequent(feature.min_count, max_codes)
    counter.close()
    counts = np.zeros(FIRST_ROW + len(kept), np.int64)
    counts[FIRST_ROW:] = kept_counts
    counts[MISSING_ROW] = num_missing
    counts[UNKNOWN_ROW] = num_all - counts.sum()
    return kept, counts


class CodeCounter:
    """Counts occurrences of codes.

    Args:
        folder: where runs are spilled; must exist, its ``run-*`` files are the counter's.
        memory_codes: distinct codes held in memory (48 bytes each while merging).
    """

    def __init__(self, folder: Path, memory_codes: int = 4_000_000) -> None:
        self._folder = folder
        self._memory_codes = memory_codes
        self._parts: list[Counted] = []
        self._held = 0
        self._runs: list[tuple[Path, Path]] = []

    @property
    def num_runs(self) -> int:
        """Runs on disk."""
        return len(self._runs)

    def add(self, codes: NDArray[np.uint64]) -> None:
        """Count ``codes [V]``."""
        distinct, counts = np.unique(codes, return_counts=True)
        self._parts.append(Counted(distinct, counts.astype(np.int64)))
        self._held += len(distinct)
        if self._held > self._memory_codes:
            self._parts = [merged(self._parts)]
            self._held = len(self._parts[0].values)
            if self._held > self._memory_codes // 2:
                self._spill()

    def most_frequent(self, min_count: int, max_codes: int | None = None) -> Counted:
        """Codes seen at least ``min_count`` times, at most ``max_codes``, and their counts.

        By falling count, ties by code. Memory: the returned codes and one range of the others.
        """
        ranges = self._ranges() if self._runs else [self._parts or [_NO_CODES]]
        kept = [merged(parts, min_count) for parts in ranges]
        codes, counts = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
        order = np.lexsort((codes, -counts))[:max_codes]
        return Counted(codes[order], counts[order])

    def close(self) -> None:
        """Remove the runs."""
        for paths in self._runs:
            for path in paths:
                path.unlink(missing_ok=True)

    def _spill(self) -> None:
        codes, counts = self._parts[0]
        paths = (
            self._folder / f"run-{len(self._runs)}.codes",
            self._folder / f"run-{len(self._runs)}.counts",
        )
        with storage_errors(paths[0]):
            codes.tofile(paths[0])
            counts.tofile(paths[1])
        self._runs.append(paths)
        self._parts = []
        self._held = 0

    def _ranges(self) -> list[list[Counted]]:
        """The runs, cut at the same codes into ranges that fit in memory; views of mapped files."""
        if self._parts:
            self._parts = [merged(self._parts)]
        runs = [
            Counted(np.memmap(a, np.uint64, "r"), np.memmap(b, np.int64, "r"))
            for a, b in self._runs
        ] + self._parts
        num_ranges = -(-sum(len(codes) for codes, _ in runs) // self._memory_codes)
        borders = np.array(
            [_UINT64_RANGE * i // num_ranges for i in range(1, num_ranges)], np.uint64
        )
        cuts = [[0, *np.searchsorted(codes, borders).tolist(), len(codes)] for codes, _ in runs]
        return [
            [
                Counted(codes[c[i] : c[i + 1]], counts[c[i] : c[i + 1]])
                for (codes, counts), c in zip(runs, cuts, strict=True)
            ]
            for i in range(num_ranges)
        ]
