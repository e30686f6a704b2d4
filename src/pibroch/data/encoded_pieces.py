"""Parsed pieces that go to the dataset at once, where there is no vocabulary to count first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.data.encode import FeatureEncoder
from pibroch.data.parse import ParsedPiece
from pibroch.data.pieces import Pieces, WholePiece
from pibroch.data.schema import Schema
from pibroch.data.splits import SPLITS, SplitRule
from pibroch.data.writer import DatasetWriter, EncodedRows, Totals, kept_name
from pibroch.kernels.arrays import Array


class EncodedPieces(Pieces):
    """Samples of a dataset, written as they are parsed.

    Where the number of all samples decides which of them train, all do, until :meth:`finish`.

    Args:
        work: holds ``dataset``, which grows, and ``spool``, for the index.
        schema: the features.
        encoders: one a feature.
        split: which samples train.
        kept: columns that are passed through.
    """

    def __init__(
        self,
        work: Path,
        schema: Schema,
        encoders: Sequence[FeatureEncoder],
        split: SplitRule,
        kept: Sequence[str] = (),
    ) -> None:
        super().__init__(work / "spool")
        self._encoders = encoders
        self._split = split
        totals = self.pieces[-1].totals if self.pieces else None
        self.writer = DatasetWriter(work / "dataset", schema, totals, kept, has_places=True)

    def _write(self, parsed: ParsedPiece, source: int) -> Totals:
        rows = encode_piece(parsed, self._encoders, source)
        if self._split.needs_total:
            self.writer.append("train", rows)
        else:
            so_far = self.num_records + len(rows.labels)
            append_assigned(self.writer, rows, self._split, self.num_records, so_far)
        return self.writer.totals

    def finish(self, num_sources: int) -> None:
        """Have the samples in their splits, when those of all sources are there."""
        samples = self.writer.totals.samples
        if self._split.needs_total and samples["train"] == self.num_records:
            split = self._split.of_files(self.samples_of_sources(num_sources))
            self.writer.divide(*split.borders(self.num_records))
            last = self.pieces[-1]
            self._note(WholePiece(last.source, last.end, 0, 0, (), self.writer.totals))


def append_assigned(
    writer: DatasetWriter, rows: EncodedRows, split: SplitRule, first: int, total: int
) -> None:
    """Append samples ``first`` and so on, of ``total``, to their splits."""
    assigned = split.assign(first, len(rows.labels), total)
    for split_id in np.unique(assigned):
        writer.append(SPLITS[split_id], rows.chosen(assigned == split_id))


def encode_piece(
    parsed: ParsedPiece, encoders: Sequence[FeatureEncoder], source: int = 0
) -> EncodedRows:
    """Columns of codes to records of ids, of lines of the source of that number."""
    columns: dict[bool, list[Array]] = {False: [], True: []}
    bags: dict[str, tuple[NDArray[np.int64], Array]] = {}
    for codes, encoder in zip(parsed.codes, encoders, strict=True):
        ids = encoder.ids(codes.values)
        if codes.lengths is None:
            columns[encoder.feature.is_raw].append(ids)
        else:
            bags[encoder.feature.name] = (codes.lengths, ids)
    for number, column in enumerate(parsed.kept):
        bags[kept_name(number)] = (column.lengths, column.text)
    num_samples = len(parsed.labels)
    return EncodedRows(
        parsed.labels,
        _records(parsed.dense, num_samples, np.dtype(np.float32)),
        _records(columns[False], num_samples, np.dtype(np.int32)),
        bags,
        np.stack(columns[True], 1) if columns[True] else None,
        parsed.sample_weights,
        parsed.groups,
        parsed.event_times,
        np.column_stack([np.full(num_samples, source), parsed.lines]),
    )


def _records(columns: Sequence[Array], num_samples: int, dtype: np.dtype[Any]) -> Array:
    return np.stack(columns, 1) if columns else np.empty((num_samples, 0), dtype)
