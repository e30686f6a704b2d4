"""The log of ids that lost their rows: Parquet files in a run's directory.

Nothing that a run goes on from is made before the lines of its steps are on the disk. A run that
goes on after a step drops the lines of later ones, and writes them again when it trains these
steps. So each line is there once, whatever was killed, and the files are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl

from pibroch.embedding.row_index import RowChanges
from pibroch.errors import ConfigError, InputError
from pibroch.kernels.arrays import Ints
from pibroch.storage import new_file, storage_errors
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import Session

LINES_PER_FILE = 1 << 18
"""And those of one step more; so many are held in memory."""
SCHEMA = {"step": pl.Int64, "table": pl.String, "id": pl.Int64, "reason": pl.String}
_DIGITS = "[0-9]" * 8
_ROOM = ("a disk with room", "free some space, and go on with --resume")


class LostIds:
    """Lines ``step, table, id, reason`` of a run, in rising order of steps.

    The last file is written anew as it grows, and the next one begins when it has
    ``LINES_PER_FILE`` lines.

    Args:
        folder: of the files.
        last_step: after which the run goes on.

    Raises:
        InputError: when one of the files is damaged.
        StorageError: when the disk refuses.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self._folder = folder
        self._lines = pl.DataFrame(schema=SCHEMA)
        self._new: list[pl.DataFrame] = []
        self._number = 0
        with storage_errors(folder, *_ROOM):
            folder.mkdir(exist_ok=True)
            self._go_on_after(last_step)

    def _go_on_after(self, last_step: int) -> None:
        numbers = [int(path.stem) for path in self._folder.glob(f"{_DIGITS}.parquet")]
        for number in sorted(numbers, reverse=True):
            path = self._path(number)
            lines = _read(path)
            kept = lines.filter(pl.col("step") <= last_step)
            if not len(kept):
                path.unlink()
                continue
            is_full = len(kept) >= LINES_PER_FILE
            self._number = number + is_full
            if not is_full:
                self._lines = kept
            if len(kept) < len(lines):
                self._write(number, kept)
            return

    def note(self, step: int, changes: Mapping[str, RowChanges]) -> None:
        """Take the ids that lost their rows in a step; see :meth:`Embeddings.watch_ids`.

        Raises:
            StorageError: when a file is full, and the disk refuses.
        """
        for table, each in changes.items():
            for reason, ids in (("evicted", each.evicted_ids), ("expired", each.expired_ids)):
                if len(ids):
                    self._new.append(_lines(step, table, ids, reason))
        if len(self._lines) + sum(map(len, self._new)) >= LINES_PER_FILE:
            self.write()
            self._number += 1
            self._lines = self._lines.clear()

    def write(self) -> None:
        """Have all lines so far on the disk.

        Raises:
            StorageError: when it refuses; they may be written later.
        """
        if self._new:
            self._lines = pl.concat([self._lines, *self._new])
            self._new = []
            self._write(self._number, self._lines)

    def _write(self, number: int, lines: pl.DataFrame) -> None:
        with new_file(self._path(number), *_ROOM) as path:
            lines.write_parquet(path)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.parquet"


def log_of(session: Session, run: RunDirectory, last_step: int) -> LostIds | None:
    """The log of a run that wants one, on the rank that writes it.

    Raises:
        ConfigError: where it wants one and no table has raw ids.
    """
    if not session.config.train.log_lost_ids:
        return None
    if session.embeddings.raw_ids is None:
        raise ConfigError(
            "train.log_lost_ids without a table of raw ids",
            "rows that ids lose",
            'write [embedding.rows] with name = "hashed", or leave it out',
        )
    if not session.world.is_first:
        return None
    log = LostIds(run.lost_ids_path, last_step)
    session.embeddings.watch_ids(log.note)
    return log


def _lines(step: int, table: str, ids: Ints, reason: str) -> pl.DataFrame:
    num = len(ids)
    return pl.DataFrame(
        {
            "step": np.full(num, step, np.int64),
            "table": pl.repeat(table, num, eager=True),
            "id": ids,
            "reason": pl.repeat(reason, num, eager=True),
        },
        schema=SCHEMA,
    )


def _read(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path, memory_map=False).select(*SCHEMA)
    except pl.exceptions.PolarsError as error:
        raise InputError(
            f"{path}, damaged: {error}", "the file as it was written", "move the folder away"
        ) from error
