"""Rows that changed since another checkpoint, in files of their own, of which many become one.

A delta lists its rows, rising; of a row that several deltas have, the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import numpy as np

from pibroch.embedding.piece import PieceView
from pibroch.embedding.row_set import ListedRows
from pibroch.kernels.arrays import Array, Ints, distinct
from pibroch.state.parts import ROW_IDS, SavedPart, WrittenPart, listed_ids, write_piece
from pibroch.state.tables import FOLDER, SavedTable
from pibroch.state.tensor_file import Stream, TensorFile, rows_that_fit, write_tensors


@dataclass(frozen=True, slots=True)
class Chain:
    """Deltas of one table that can become one.

    Attributes:
        table: its name.
        parts: in the order in which they count.
    """

    table: str
    parts: tuple[SavedPart, ...]


def write_deltas(folder: Path, name: str, views: Sequence[PieceView]) -> list[WrittenPart]:
    """Write pieces of listed rows into the checkpoint ``folder`` as deltas.

    Those without rows leave nothing.

    Args:
        folder: has a folder for tables.
        name: what tells these files from those of other ranks and steps.
        views: rows that changed, of pieces that may be copies: of those the primary one is written.

    Raises:
        TrainingError: when a number is NaN or infinite.
        OSError: when the disk refuses.
    """
    written = []
    for number, view in enumerate(views):
        if view.piece.is_primary and len(view.piece.rows):
            assert isinstance(view.piece.rows, ListedRows), "of a cut"
            table = quote(view.piece.table.name, safe=" ")
            one = write_piece(folder, f"{FOLDER}/{table}@{name}-{number}.safetensors", view)
            written.append(replace(one, part=replace(one.part, is_delta=True)))
    return written


def chains(tables: Mapping[str, SavedTable]) -> list[Chain]:
    """Of each table the deltas of the same columns, which can become one.

    None where columns of other deltas overlap with these.

    >>> one, two = (SavedPart(name, (0, 4), None, True) for name in "ab")
    >>> half = SavedPart("c", (0, 2), None, True)
    >>> t, u = (SavedTable(9, 4, {}, (one, other)) for other in (two, half))
    >>> [len(chain.parts) for chain in chains({"t": t, "u": u})]
    [2]
    """
    mergeable = []
    for table, saved in tables.items():
        deltas = [part for part in saved.parts if part.is_delta]
        kinds = sorted({part.columns for part in deltas})
        if any(left[1] > right[0] for left, right in pairwise(kinds)):
            continue
        for columns in kinds:
            parts = tuple(part for part in deltas if part.columns == columns)
            if len(parts) > 1:
                mergeable.append(Chain(table, parts))
    return mergeable


def merge(chain: Chain, source: Path, folder: Path, file: str) -> WrittenPart:
    """Write one delta in place of several.

    Memory grows with the number of rows, by some 30 bytes each.

    Args:
        chain: what becomes one.
        source: the checkpoint that has its files.
        folder: the checkpoint to write into.
        file: the new one's path in it.

    Raises:
        OSError: when the disk refuses.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(source, part.file)) for part in chain.parts]
        ids = [_all_ids(each) for each in files]
        union = distinct(np.concatenate(ids))
        owner = np.empty(len(union), np.int32)
        for number, own in enumerate(ids):
            owner[np.searchsorted(union, own)] = number
        streams = {ROW_IDS: Stream.of(union)}
        for name in sorted(files[0].names - {ROW_IDS}):
            shape = (len(union), *files[0].shape(name)[1:])
            streams[name] = Stream(
                np.dtype(np.float32), shape, _newest(files, name, ids, union, owner, shape[1:])
            )
        digest = write_tensors(folder / file, streams)
    part = SavedPart(file, chain.parts[0].columns, None, is_delta=True)
    return WrittenPart(chain.table, part, digest)


def _all_ids(file: TensorFile) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *(ids.copy() for ids in listed_ids(file))])


def _newest(
    files: Sequence[TensorFile],
    name: str,
    ids: Sequence[Ints],
    union: Ints,
    owner: Array,
    width: tuple[int, ...],
) -> Iterator[Array]:
    """A tensor's rows of the union, each from the file that owns it.

    Rows rise in all files, so that each is read once.
    """
    rows_per_chunk = rows_that_fit(4 * int(np.prod(width, dtype=np.int64)))
    for start in range(0, len(union), rows_per_chunk):
        wanted = union[start : start + rows_per_chunk]
        owners = owner[start : start + rows_per_chunk]
        out = np.empty((len(wanted), *width), np.float32)
        for number, (file, own) in enumerate(zip(files, ids, strict=True)):
            first, after = np.searchsorted(own, [wanted[0], wanted[-1] + 1]).tolist()
            if first == after:
                continue
            places = np.searchsorted(wanted, own[first:after])
            counts = owners[places] == number
            for begin, chunk in file.chunks(name, range(first, after)):
                here = slice(begin - first, begin - first + len(chunk))
                out[places[here][counts[here]]] = chunk[counts[here]]
        yield out
