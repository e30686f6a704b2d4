"""Weights from outside, streamed into the pieces of a table.

They come as arrays, ``.npy``, safetensors or Parquet files. What is read at a time does not grow
with the table. A source is read twice: once to see that all of it is right, before anything is
written, and once into the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from safetensors import safe_open

from pibroch.embedding.optimizers import SparseOptimizer
from pibroch.embedding.piece import PieceView
from pibroch.embedding.row_index import LearningIndex, RowIndex
from pibroch.embedding.row_set import places_of
from pibroch.embedding.table import Table
from pibroch.errors import DataError
from pibroch.kernels.arrays import Array, Ints, Records, distinct

CHUNK_BYTES = 8 << 20


class _Matrix(Protocol):
    """Rows of numbers somewhere."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``[rows, D]``."""

    def rows(self, start: int, stop: int) -> Array:
        """Some of them, of any type of number."""


@dataclass(frozen=True)
class _Array:
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def rows(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


@dataclass(frozen=True)
class _TorchTensor:
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, start: int, stop: int) -> Array:
        return self.tensor[start:stop].float().numpy()


@dataclass(frozen=True)
class _Npy:
    """Mapped anew for each look, so that what was read does not stay in memory."""

    path: Path
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Array:
        return np.array(np.load(self.path, mmap_mode="r", allow_pickle=False)[start:stop])


@dataclass(frozen=True)
class _Safetensors:
    """Likewise."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Array:
        with safe_open(self.path, "pt") as file:
            numbers: Array = file.get_slice(self.name)[start:stop].float().numpy()
        return numbers


@dataclass(frozen=True)
class _Frame:
    """Columns of a Parquet file: one of lists, or one a weight."""

    frame: Any
    columns: Sequence[str]
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Array:
        some = self.frame.slice(start, stop - start).select(self.columns).collect()
        if len(self.columns) > 1:
            numbers: Array = some.to_numpy()
            return numbers
        lists = some[self.columns[0]]
        lengths = lists.cast(pl.List(pl.Float32)).list.len().fill_null(0)
        odd = [place for place, length in enumerate(lengths) if length != self.shape[1]]
        if odd:
            where = f"row {start + odd[0]} of column {self.columns[0]!r}"
            raise DataError(
                f"a list of {lengths[odd[0]]} numbers in {where}", f"{self.shape[1]} in each row"
            )
        return np.asarray(lists.explode().to_numpy()).reshape(-1, self.shape[1])


def load_weights(
    views: Sequence[PieceView],
    table: Table,
    index: RowIndex,
    optimizer: SparseOptimizer,
    source: object,
    *,
    tensor: str | None = None,
    ids: object = None,
    step: int = 0,
) -> None:
    """Write weights from outside to the pieces of a table that are here.

    Optimizer state stays as it is. An index that learns gives rows to ids that have none, whose
    optimizer state is clean.

    Args:
        views: the pieces that are here; those of other tables are left alone.
        table: whose rows they are.
        index: of the table, from ids to rows.
        optimizer: of the table.
        source: numbers ``[rows, D]``: an array or tensor, or the path of a ``.npy``,
            ``.safetensors`` or ``.parquet`` file.
        tensor: which tensor of a safetensors file, or which column of lists of a Parquet file; may
            be left out where there is one. A Parquet file may also have a column of numbers for
            each weight.
        ids: the id of each row of the source, where these are not 0, 1, 2, ... up to the table's
            last: int64 ``[rows]``, or the name of a Parquet file's column, or of a safetensors
            file's tensor.
        step: of the module, as of which moving averages begin anew.

    Raises:
        DataError: for a source that cannot be read, or does not fit the table; nothing was written.
    """
    matrix, given = _open(source, table, tensor, ids)
    num_rows = matrix.shape[0]
    if len(matrix.shape) != 2 or matrix.shape[1] != table.dim:
        raise DataError(
            f"weights {list(matrix.shape)} for table {table.name!r}", f"[rows, {table.dim}]"
        )
    if given is None and num_rows != table.num_rows and not isinstance(index, LearningIndex):
        raise DataError(
            f"{num_rows:,} rows for table {table.name!r}",
            f"{table.num_rows:,}",
            "say by ids which rows they are",
        )
    if given is not None:
        _check_ids(given, num_rows, table)

    def rows_from(start: int, count: int) -> Ints:
        if given is None:
            return index.rows_of(np.arange(start, start + count))
        return index.rows_of(given[start : start + count].astype(np.int64))

    for start, weights in _chunks(matrix):
        rows = rows_from(start, len(weights))
        bad = np.flatnonzero((rows < 0) | (rows >= table.num_rows))
        if len(bad) and not isinstance(index, LearningIndex):
            place = start + int(bad[0])
            id_ = place if given is None else int(given[place])
            raise index.refusal(id_, f"in row {place} of the weights for table {table.name!r}")
        bad = np.flatnonzero(~np.isfinite(weights).all(1))
        if len(bad):
            raise DataError(
                f"NaN or an infinite number in row {start + int(bad[0])} of the weights",
                "finite numbers",
            )
    own_views = [view for view in views if view.piece.table.name == table.name]
    if isinstance(index, LearningIndex):
        all_ids = np.arange(num_rows) if given is None else given.astype(np.int64)
        fresh_rows = index.insert(all_ids)
        for view in own_views:
            places = places_of(view.piece.rows, fresh_rows)
            for numbers in view.state.values():
                numbers[places[places >= 0]] = optimizer.initial_state()
    for start, weights in _chunks(matrix):
        rows = rows_from(start, len(weights))
        for view in own_views:
            _write(view, rows, weights, step)


def _write(view: PieceView, rows: Ints, weights: Records, step: int) -> None:
    columns = view.piece.columns
    places = places_of(view.piece.rows, rows)
    mask = places >= 0
    places = places[mask]
    part = weights[mask, columns.start : columns.stop]
    view.weights[places] = part
    if "average" in view.state:
        view.state["average"][places] = part
        view.state["averaged_at"][places] = step
    view.mark(places)


def _chunks(matrix: _Matrix) -> Iterator[tuple[int, Records]]:
    num_rows, width = matrix.shape
    step = max(1, CHUNK_BYTES // (4 * max(1, width)))
    for start in range(0, num_rows, step):
        some = matrix.rows(start, min(start + step, num_rows))
        if some.dtype.kind not in "fiu":
            raise DataError(f"weights of type {some.dtype}", "numbers")
        yield start, np.ascontiguousarray(some, np.float32)


def _check_ids(ids: Ints, num_rows: int, table: Table) -> None:
    if ids.shape != (num_rows,) or ids.dtype.kind not in "iu":
        raise DataError(
            f"ids {list(ids.shape)} of type {ids.dtype}",
            f"{num_rows} whole numbers, one a row of the weights",
        )
    if len(distinct(ids)) < len(ids):
        raise DataError(
            f"an id twice among those of the weights for table {table.name!r}", "each row once"
        )


def _open(
    source: object, table: Table, tensor: str | None, ids: object
) -> tuple[_Matrix, Ints | None]:
    rows = None if ids is None or isinstance(ids, str) else np.asarray(ids)
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        return _TorchTensor(source), rows
    if not isinstance(source, str | Path):
        return _Array(np.asarray(source)), rows
    path = Path(source)
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        raise DataError(
            f"{path} as weights", f"a file that ends in {', '.join(_OPENERS)}, or an array"
        )
    if not path.is_file():
        raise DataError(f"{path}, which is not there", "a file of weights")
    try:
        return opener(path, table, tensor, ids, rows)
    except DataError:
        raise
    except Exception as error:  # of three libraries, which do not say what they raise
        raise DataError(
            f"{path}, which cannot be read: {error}", f"a {path.suffix} file of weights"
        ) from error


def _open_npy(
    path: Path, table: Table, tensor: str | None, ids: object, rows: Ints | None
) -> tuple[_Matrix, Ints | None]:
    return _Npy(path, np.load(path, mmap_mode="r", allow_pickle=False).shape), rows


def _open_safetensors(
    path: Path, table: Table, tensor: str | None, ids: object, rows: Ints | None
) -> tuple[_Matrix, Ints | None]:
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
        if isinstance(ids, str):
            names.remove(_one_of(names, ids, f"tensor of ids of {path}"))
            rows = file.get_tensor(ids).numpy()
        name = _one_of(names, tensor, f"tensor of {path}")
        return _Safetensors(path, name, tuple(file.get_slice(name).get_shape())), rows


def _open_parquet(
    path: Path, table: Table, tensor: str | None, ids: object, rows: Ints | None
) -> tuple[_Matrix, Ints | None]:
    frame = pl.scan_parquet(path, glob=False)
    types = dict(frame.collect_schema())
    num_rows = int(frame.select(pl.len()).collect().item())
    if isinstance(ids, str):
        if ids not in types:
            raise DataError(f"no column {ids!r} in {path}", f"one of {', '.join(types)}")
        del types[ids]
        rows = frame.select(ids).collect()[ids].to_numpy()
    lists = [name for name, kind in types.items() if isinstance(kind, pl.List | pl.Array)]
    if tensor is None and not lists:
        return _Frame(frame, list(types), (num_rows, len(types))), rows
    return _Frame(
        frame, [_one_of(lists, tensor, f"column of lists of {path}")], (num_rows, table.dim)
    ), rows


def _one_of(names: Sequence[str], wanted: str | None, what: str) -> str:
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or wanted not in names:
        got = "none named" if wanted is None else repr(wanted)
        raise DataError(
            f"{got} as {what}", f"one of {', '.join(names) or 'those that there are: none'}"
        )
    return wanted


_OPENERS: dict[str, Callable[..., tuple[_Matrix, Ints | None]]] = {
    ".npy": _open_npy,
    ".safetensors": _open_safetensors,
    ".parquet": _open_parquet,
}
