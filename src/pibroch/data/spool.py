"""Parsed pieces on disk, so that preparation can be resumed and takes bounded memory.

One ``.npz`` a piece, one column an array, so that counting reads one feature at a time. A line in
``pieces.jsonl`` says that a piece is whole; pieces without a line are written again. The spool
takes about the space of the uncompressed text and is removed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pibroch.data.parse import Codes, ParsedPiece
from pibroch.data.schema import Schema
from pibroch.data.sources import Place
from pibroch.data.storage import append_json_line, read_json_lines
from pibroch.kernels.arrays import Array
from pibroch.storage import storage_errors


@dataclass(frozen=True, slots=True)
class SpooledPiece:
    """One piece that is whole on disk.

    Attributes:
        source: number of its source.
        end: where the next piece of that source begins.
        num_records: good records in it.
        num_bad: records left out.
        bad: the first of those, with file, line and reason.
    """

    source: int
    end: Place
    num_records: int
    num_bad: int
    bad: tuple[str, ...]


class Spool:
    """The pieces parsed so far.

    Args:
        folder: exists; pieces that are already in it are taken over.
        schema: the features, for the names of the columns.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self.schema = schema
        self._folder = folder
        self._index = folder / "pieces.jsonl"
        self.pieces = [
            SpooledPiece(**(line | {"end": Place(**line["end"]), "bad": tuple(line["bad"])}))
            for line in read_json_lines(self._index)
        ]
        self.num_records = sum(piece.num_records for piece in self.pieces)
        self.num_bad = sum(piece.num_bad for piece in self.pieces)

    def bad_records(self, count: int) -> list[str]:
        """The first records that were left out."""
        return [text for piece in self.pieces for text in piece.bad][:count]

    def append(self, parsed: ParsedPiece, source: int, place: str, end: Place) -> None:
        """Write a piece and note that it is whole.

        ``place`` goes before the number of a bad record's line or row.

        Raises:
            StorageError: when the disk refuses.
        """
        arrays: dict[str, Array] = {"labels": parsed.labels}
        arrays |= {f"dense.{i}": column for i, column in enumerate(parsed.dense)}
        for i, codes in enumerate(parsed.codes):
            arrays[f"codes.{i}"] = codes.values
            if codes.lengths is not None:
                arrays[f"lengths.{i}"] = codes.lengths
        target = self._path(len(self.pieces))
        with storage_errors(target):
            np.savez(target, **arrays)  # type: ignore[arg-type] # arrays are keywords
        bad = tuple(f"{place} {record.line}: {record.reason}" for record in parsed.bad)
        piece = SpooledPiece(source, end, len(parsed.labels), parsed.num_bad, bad)
        append_json_line(self._index, asdict(piece))
        self.pieces.append(piece)
        self.num_records += piece.num_records
        self.num_bad += piece.num_bad

    def codes_of(self, number: int, feature_id: int) -> Codes:
        """The codes of one feature in piece ``number``."""
        with np.load(self._path(number)) as arrays:
            return _codes(arrays, feature_id)

    def read(self, number: int) -> ParsedPiece:
        """All columns of piece ``number``."""
        with np.load(self._path(number)) as arrays:
            dense = tuple(arrays[f"dense.{i}"] for i in range(len(self.schema.dense)))
            codes = tuple(_codes(arrays, i) for i in range(len(self.schema.categorical)))
            return ParsedPiece(arrays["labels"], dense, codes, 0, ())

    def _path(self, number: int) -> Path:
        return self._folder / f"piece-{number:06d}.npz"


def _codes(arrays: Mapping[str, Array], feature_id: int) -> Codes:
    return Codes(arrays[f"codes.{feature_id}"], arrays.get(f"lengths.{feature_id}"))
