"""The arrays of ``torchrec.datasets.criteo``: three files a day, mapped into memory.

``day_0_dense.npy`` float32 ``[n, 13]``, ``day_0_sparse.npy`` int32 ``[n, 26]`` and
``day_0_labels.npy`` int32 ``[n, 1]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from pibroch.data.layout import Layout
from pibroch.data.parquet import SEPARATOR, text_of_rows
from pibroch.data.presets import NUM_CRITEO_CATEGORICAL, NUM_CRITEO_DENSE
from pibroch.data.sources import Place, TextPiece, existing
from pibroch.errors import DataError
from pibroch.kernels.arrays import Array

_DENSE = "_dense.npy"
_LABELS = "_labels.npy"
_SPARSE = "_sparse.npy"
_BYTES_PER_VALUE = 12
_DO = "write it as torchrec.datasets.criteo does, or check how it was copied"


class NpySource:
    """A day of such files, as rows of text of the columns ``label``, ``I1``… and ``C1``….

    Nothing but the rows of a piece is in memory.

    Args:
        path: ``…_dense.npy``; the others lie beside it.
        has_labels: whether labels are read; without, their file may be absent.

    Attributes:
        path: as given.
        more_files: that are read.
        columns: of the text.
        layout: of the text.

    Raises:
        DataError: for a file that is missing or damaged, or an array of another type or shape.
    """

    layout = Layout(SEPARATOR, True, "row")

    def __init__(self, path: Path, has_labels: bool = True) -> None:
        self.path = path
        if not path.name.endswith(_DENSE):
            raise DataError(
                f"{path}",
                f"a file of dense values, ...{_DENSE}",
                f"give this one of each day: ...{_SPARSE} and ...{_LABELS} are found beside it",
            )
        stem = path.name.removesuffix(_DENSE)
        dense = _opened(path, "float32", NUM_CRITEO_DENSE)
        sparse = _opened(path.with_name(stem + _SPARSE), "int32", NUM_CRITEO_CATEGORICAL)
        self._arrays = {"I": dense, "C": sparse}
        self.more_files: tuple[Path, ...] = (path.with_name(stem + _SPARSE),)
        self._labels: Array | None = None
        if has_labels:
            self.more_files += (path.with_name(stem + _LABELS),)
            self._labels = _opened(self.more_files[-1], "int32", 1)
        self._num_rows = len(dense)
        arrays = [*self._arrays.values(), *([] if self._labels is None else [self._labels])]
        for file, array in zip((path, *self.more_files), arrays, strict=True):
            if len(array) != self._num_rows:
                raise DataError(
                    f"{len(array):,} rows in {file}", f"{self._num_rows:,}, as in {path}", _DO
                )
        if not self._num_rows:
            raise DataError(f"{path}, which has no rows", "at least one", _DO)
        self.columns = (
            *(() if self._labels is None else ("label",)),
            *(f"I{number + 1}" for number in range(NUM_CRITEO_DENSE)),
            *(f"C{number + 1}" for number in range(NUM_CRITEO_CATEGORICAL)),
        )

    def pieces(self, start: Place, piece_bytes: int) -> Iterator[TextPiece]:
        """See :class:`pibroch.data.sources.RawSource`; places count rows."""
        num_rows = max(1, piece_bytes // (_BYTES_PER_VALUE * len(self.columns)))
        for first in range(start.offset, self._num_rows, num_rows):
            end = min(first + num_rows, self._num_rows)
            yield TextPiece(
                text_of_rows(self._frame(first, end)),
                Place(first, first),
                Place(end, end),
                end / self._num_rows,
            )

    def _frame(self, first: int, end: int) -> pl.DataFrame:
        columns = [] if self._labels is None else [self._labels[first:end, 0]]
        dense, sparse = (np.array(array[first:end]) for array in self._arrays.values())
        with np.errstate(invalid="ignore"):  # NaNs of whichever bits are missing values
            columns += [*dense.astype(np.float64).T, *sparse.T]
        frame = pl.DataFrame(dict(zip(self.columns, columns, strict=True)))
        return frame.fill_nan(None)  # a missing value


def _opened(path: Path, dtype: str, num_columns: int) -> Array:
    """A mapped array ``[n, num_columns]``."""
    try:
        array: Array = np.load(existing(path), mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # NumPy evaluates the header: it may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: {reason}", "a sound .npy file without pickles", _DO) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}, an archive of arrays", "one array", _DO)
    if array.ndim == 1 and num_columns == 1:
        array = array[:, None]
    if array.dtype != dtype or array.ndim != 2 or array.shape[1] != num_columns:
        got = f"{array.dtype} {list(array.shape)} in {path}"
        raise DataError(got, f"{dtype} [n, {num_columns}]", _DO)
    return array
