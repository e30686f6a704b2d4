"""Parsed pieces on disk, so that vocabularies can be counted before anything is encoded.

One ``.npz`` a piece, one column an array, so that counting reads one feature at a time. The spool
takes about the space of the uncompressed text and is removed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.data.parse import Codes, LoggedEvents, ParsedPiece, Texts
from pibroch.data.pieces import Pieces
from pibroch.data.schema import Schema
from pibroch.data.storage import read_json_lines
from pibroch.data.targets import clicks_of
from pibroch.kernels.arrays import Array
from pibroch.storage import append_json_lines, storage_errors

_BUILT = "histories.jsonl"


class Spool(Pieces):
    """Columns of codes.

    Args:
        folder: exists; pieces that are already in it are taken over.
        schema: the features, for the names of the columns.
        num_kept: columns that are passed through.
    """

    def __init__(self, folder: Path, schema: Schema, num_kept: int = 0) -> None:
        super().__init__(folder)
        self.schema = schema
        self._num_kept = num_kept
        self._folder = folder

    def _write(self, parsed: ParsedPiece, source: int) -> None:
        arrays: dict[str, Array] = {"labels": parsed.labels, "lines": parsed.lines}
        if parsed.sample_weights is not None:
            arrays["sample_weights"] = parsed.sample_weights
        if parsed.groups is not None:
            arrays["groups"] = parsed.groups
        if parsed.event_times is not None:
            arrays["event_times"] = parsed.event_times
        arrays |= {f"dense.{i}": column for i, column in enumerate(parsed.dense)}
        for i, codes in enumerate(parsed.codes):
            arrays[f"codes.{i}"] = codes.values
            if codes.lengths is not None:
                arrays[f"lengths.{i}"] = codes.lengths
        for i, column in enumerate(parsed.kept):
            arrays |= {f"kept.{i}": column.text, f"kept_lengths.{i}": column.lengths}
        for i, events in parsed.events.items():
            arrays |= {f"users.{i}": events.users, f"items.{i}": events.items}
            if events.times is not None:
                arrays[f"times.{i}"] = events.times
        _save(self._path(len(self.pieces)), arrays)

    def codes_of(self, number: int, feature_id: int) -> Codes:
        """The codes of one feature in piece ``number``."""
        if self.schema.categorical[feature_id].events is not None:
            with np.load(self._histories_path(number, feature_id)) as arrays:
                return _codes(arrays, feature_id)
        with np.load(self._path(number)) as arrays:
            return _codes(arrays, feature_id)

    def events_of(self, number: int, feature_id: int) -> LoggedEvents:
        """The events of piece ``number`` that the sequences of one feature are built from."""
        with np.load(self._path(number)) as arrays:
            return LoggedEvents(
                arrays[f"users.{feature_id}"],
                arrays[f"items.{feature_id}"],
                clicks_of(arrays["labels"]),
                arrays.get(f"times.{feature_id}"),
            )

    def has_histories(self, feature_id: int) -> bool:
        """Whether the sequences of a feature are built."""
        return {"feature": feature_id} in read_json_lines(self._folder / _BUILT)

    def write_histories(
        self,
        number: int,
        feature_id: int,
        part: int,
        lengths: NDArray[np.int64],
        codes: NDArray[np.uint64],
    ) -> None:
        """Write some users' sequences of piece ``number``.

        Raises:
            StorageError: when the disk refuses.
        """
        arrays: dict[str, Array] = {f"codes.{feature_id}": codes, f"lengths.{feature_id}": lengths}
        _save(self._histories_path(number, feature_id, part), arrays)

    def join_histories(self, feature_id: int, num_parts: int) -> None:
        """Put all users' sequences together; they are there from then on.

        Raises:
            StorageError: when the disk refuses.
        """
        for number, piece in enumerate(self.pieces):
            paths = [self._histories_path(number, feature_id, part) for part in range(num_parts)]
            parts = []
            for path in paths:
                with np.load(path) as arrays:
                    parts.append(_codes(arrays, feature_id))
            joined = _joined(parts, piece.num_records)
            arrays = {f"codes.{feature_id}": joined.values, f"lengths.{feature_id}": joined.lengths}
            _save(self._histories_path(number, feature_id), arrays)
            for path in paths:
                path.unlink()
        append_json_lines(self._folder / _BUILT, {"feature": feature_id})

    def read(self, number: int) -> ParsedPiece:
        """All columns of piece ``number``."""
        with np.load(self._path(number)) as arrays:
            dense = tuple(arrays[f"dense.{i}"] for i in range(len(self.schema.dense)))
            codes = tuple(
                _codes(arrays, i) if feature.events is None else self.codes_of(number, i)
                for i, feature in enumerate(self.schema.categorical)
            )
            kept = tuple(
                Texts(arrays[f"kept.{i}"], arrays[f"kept_lengths.{i}"])
                for i in range(self._num_kept)
            )
            return ParsedPiece(
                arrays["labels"],
                dense,
                codes,
                0,
                (),
                arrays["lines"],
                kept=kept,
                sample_weights=arrays.get("sample_weights"),
                groups=arrays.get("groups"),
                event_times=arrays.get("event_times"),
            )

    def _path(self, number: int) -> Path:
        return self._folder / f"piece-{number:06d}.npz"

    def _histories_path(self, number: int, feature_id: int, part: int | None = None) -> Path:
        of_part = "" if part is None else f"-of-part-{part}"
        return self._folder / f"histories-{feature_id}-{number:06d}{of_part}.npz"


def _save(target: Path, arrays: Mapping[str, Array]) -> None:
    with storage_errors(target):
        np.savez(target, **arrays)  # type: ignore[arg-type] # arrays are keywords


def _joined(parts: Sequence[Codes], num_records: int) -> Codes:
    """Sequences of records, each of which is in one of the parts and -1 long in others."""
    lengths_PR = np.stack([part.lengths for part in parts if part.lengths is not None])
    lengths = lengths_PR.max(0, initial=0)
    assert len(lengths) == num_records, "all records of the piece"
    values = np.empty(lengths.sum(), np.uint64)
    for part, of_part in zip(parts, lengths_PR, strict=True):
        values[np.repeat(of_part >= 0, lengths)] = part.values
    return Codes(values, lengths)


def _codes(arrays: Mapping[str, Array], feature_id: int) -> Codes:
    return Codes(arrays[f"codes.{feature_id}"], arrays.get(f"lengths.{feature_id}"))
