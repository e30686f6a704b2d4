"""Parsed pieces on disk, so that vocabularies can be counted before anything is encoded.

One ``.npz`` a piece, one column an array, so that counting reads one feature at a time. The spool
takes about the space of the uncompressed text and is removed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pibroch.data.parse import Codes, ParsedPiece
from pibroch.data.pieces import Pieces
from pibroch.data.schema import Schema
from pibroch.kernels.arrays import Array
from pibroch.storage import storage_errors


class Spool(Pieces):
    """Columns of codes.

    Args:
        folder: exists; pieces that are already in it are taken over.
        schema: the features, for the names of the columns.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        super().__init__(folder)
        self.schema = schema
        self._folder = folder

    def _write(self, parsed: ParsedPiece) -> None:
        arrays: dict[str, Array] = {"labels": parsed.labels}
        arrays |= {f"dense.{i}": column for i, column in enumerate(parsed.dense)}
        for i, codes in enumerate(parsed.codes):
            arrays[f"codes.{i}"] = codes.values
            if codes.lengths is not None:
                arrays[f"lengths.{i}"] = codes.lengths
        target = self._path(len(self.pieces))
        with storage_errors(target):
            np.savez(target, **arrays)  # type: ignore[arg-type] # arrays are keywords

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
