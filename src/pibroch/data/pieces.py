"""The pieces of raw data that are done, so that preparation can be resumed.

A line in ``pieces.jsonl`` says that a piece is whole; pieces without a line are written again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pibroch.data.parse import ParsedPiece
from pibroch.data.sources import Place
from pibroch.data.storage import read_json_lines
from pibroch.data.writer import Totals
from pibroch.storage import append_json_lines


@dataclass(frozen=True, slots=True)
class WholePiece:
    """One piece that is whole on disk.

    Attributes:
        source: number of its source.
        end: where the next piece of that source begins.
        num_records: good records in it.
        num_bad: records left out.
        bad: the first of those, with file, line and reason.
        doubts: what is probably not meant so.
        totals: of the dataset with it, where pieces go there at once.
    """

    source: int
    end: Place
    num_records: int
    num_bad: int
    bad: tuple[str, ...]
    totals: Totals | None = None
    doubts: tuple[str, ...] = ()

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> WholePiece:
        """As it stands in the index."""
        totals = None if line["totals"] is None else Totals(**line["totals"])
        texts = {name: tuple(line[name]) for name in ("bad", "doubts")}
        return cls(**(line | texts | {"end": Place(**line["end"]), "totals": totals}))


class Pieces(ABC):
    """The pieces parsed so far.

    Args:
        folder: exists; pieces of its index are taken over.
    """

    def __init__(self, folder: Path) -> None:
        self._index = folder / "pieces.jsonl"
        self.pieces = [WholePiece.of_line(line) for line in read_json_lines(self._index)]
        self.num_records = sum(piece.num_records for piece in self.pieces)
        self.num_bad = sum(piece.num_bad for piece in self.pieces)

    def samples_of_sources(self, count: int) -> list[int]:
        """Good records of each of the first ``count`` sources."""
        samples = [0] * count
        for piece in self.pieces:
            samples[piece.source] += piece.num_records
        return samples

    def bad_records(self, count: int) -> list[str]:
        """The first records that were left out."""
        return [text for piece in self.pieces for text in piece.bad][:count]

    def doubts(self) -> list[str]:
        """What is probably not meant so, each sentence once."""
        return list(dict.fromkeys(text for piece in self.pieces for text in piece.doubts))

    def append(self, parsed: ParsedPiece, source: int, place: str, end: Place) -> None:
        """Write a piece and note that it is whole.

        ``place`` goes before the number of a bad record's line or row.

        Raises:
            StorageError: when the disk refuses.
        """
        totals = self._write(parsed, source)
        bad = tuple(f"{place} {record.line}: {record.reason}" for record in parsed.bad)
        counts = len(parsed.labels), parsed.num_bad
        self._note(WholePiece(source, end, *counts, bad, totals, parsed.doubts))

    @abstractmethod
    def _write(self, parsed: ParsedPiece, source: int) -> Totals | None:
        """Write a piece, over what is left of an earlier try."""

    def _note(self, piece: WholePiece) -> None:
        append_json_lines(self._index, asdict(piece))
        self.pieces.append(piece)
        self.num_records += piece.num_records
        self.num_bad += piece.num_bad
