"""The counting pass: for each table its vocabulary and how often training reads each row.

One feature at a time over the spool, in bounded memory; a feature whose counts are on disk is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.data.counting import CodeCounter
from pibroch.data.encode import FeatureEncoder
from pibroch.data.schema import CategoricalFeature
from pibroch.data.splits import TRAIN, SplitRule
from pibroch.data.spool import Spool
from pibroch.data.transform import FIRST_ROW, MISSING_ROW, UNKNOWN_ROW
from pibroch.data.writer import write_table
from pibroch.kernels.text import EMPTY_CODE


def count_table(
    spool: Spool,
    feature_id: int,
    split: SplitRule,
    work: Path,
    memory_codes: int,
    vocabulary: NDArray[np.uint64] | None = None,
) -> int:
    """Write the table of one feature below ``work/dataset`` unless it is there; its rows.

    Args:
        spool: all pieces.
        feature_id: place of the feature in the schema.
        split: says which samples train.
        work: holds ``dataset`` and ``runs``.
        memory_codes: see :class:`CodeCounter`.
        vocabulary: of another dataset, to take over: the codes of rows 2, 3, ...
    """
    feature = spool.schema.categorical[feature_id]
    path = work / "dataset" / "tables" / f"{feature.name}.counts.i64"
    if not path.exists():
        pieces = _train_codes(spool, feature_id, split)
        if vocabulary is not None:
            write_table(
                work / "dataset",
                feature.name,
                _row_counts(FeatureEncoder(feature, vocabulary), pieces),
                vocabulary,
            )
        elif feature.fixed_num_rows is None:
            codes, counts = _vocabulary(feature, pieces, CodeCounter(work / "runs", memory_codes))
            write_table(work / "dataset", feature.name, counts, codes)
        else:
            write_table(
                work / "dataset", feature.name, _row_counts(FeatureEncoder(feature), pieces)
            )
    return path.stat().st_size // np.dtype(np.int64).itemsize


def _train_codes(spool: Spool, feature_id: int, split: SplitRule) -> Iterator[NDArray[np.uint64]]:
    """Codes of one feature over the training split, piece by piece."""
    first = 0
    for number, piece in enumerate(spool.pieces):
        in_train = split.assign(first, piece.num_records, spool.num_records) == TRAIN
        first += piece.num_records
        if in_train.any():
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


def _row_counts(encoder: FeatureEncoder, pieces: Iterator[NDArray[np.uint64]]) -> NDArray[np.int64]:
    counts = np.zeros(encoder.num_rows, np.int64)
    for codes in pieces:
        counts += np.bincount(encoder.rows(codes), minlength=encoder.num_rows)
    return counts
