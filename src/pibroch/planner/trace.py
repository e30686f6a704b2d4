"""Traces of lookups: text, one row index a line, plain, gzip or zstd.

Each lookup counts as a sample.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.data.sources import Place, TextSource
from pibroch.errors import DataError
from pibroch.planner.profile import AccessProfile, ProfileCounter, Progress

PIECE_BYTES = 16 << 20


def count_trace(
    path: Path,
    num_rows: int | None = None,
    batch_size: int = 1024,
    table: str | None = None,
    progress: Progress | None = None,
) -> AccessProfile:
    """Count a trace in one pass.

    Args:
        path: of the trace.
        num_rows: of its table; the greatest index + 1 when absent, for which the trace is read once
            more.
        batch_size: lookups of a batch.
        table: name of the table; that of the file when absent.
        progress: called with the stage and the fraction that is done.

    Raises:
        DataError: naming the first line that is no index of the table, or when there is no line.
    """
    progress = progress or (lambda stage, fraction: None)
    digest = hashlib.sha256()
    if num_rows is None:
        num_rows = 1 + max(
            (int(ids.max()) for _, ids in _pieces(path, lambda stage, fraction: None)), default=0
        )
    name = table or path.name.split(".")[0]
    counter = ProfileCounter({name: num_rows})
    held = np.empty(0, np.int64)
    for first_line, ids in _pieces(path, progress):
        outside = np.flatnonzero((ids < 0) | (ids >= num_rows))
        if len(outside):
            line = first_line + int(outside[0])
            got = f"{path}, line {line}: index {ids[outside[0]]}"
            raise DataError(got, f"0 to {num_rows - 1}", "give the table more rows with --rows")
        digest.update(ids.tobytes())
        held = np.concatenate([held, ids])
        whole = len(held) // batch_size * batch_size
        for start in range(0, whole, batch_size):
            counter.add({name: [held[start : start + batch_size]]}, batch_size)
        held = held[whole:]
    if len(held):
        counter.add({name: [held]}, len(held))
    if not counter.num_samples:
        raise DataError(f"{path}, which is empty", "one index a line", "check the path")
    return counter.profile(batch_size, digest.hexdigest(), {"trace": path.name})


def _pieces(path: Path, progress: Progress) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The number of a piece's first line, and its indices."""
    for piece in TextSource(path, "\t", False, ("index",)).pieces(Place(), PIECE_BYTES):
        line = piece.start.line + 1
        yield line, _indices(io.BytesIO(piece.text).readlines(), path, line)
        progress("counting", piece.fraction)


def _indices(lines: list[bytes], path: Path, first_line: int) -> NDArray[np.int64]:
    try:
        return np.array(lines, dtype="S20").astype(np.int64)
    except ValueError as error:
        for number, text in enumerate(lines, first_line):
            if not text.strip().lstrip(b"-").isdigit():
                raise DataError(
                    f"{path}, line {number}: {text.strip()[:40]!r}",
                    "one row index a line",
                    "correct the trace",
                ) from error
        raise DataError(f"{path}: {error}", "one row index a line", "correct the trace") from error
