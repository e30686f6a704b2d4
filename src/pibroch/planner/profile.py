"""What training reads: accesses to each row, and batches in which it occurs.

Both are needed. A lookup costs once an access (OPER, Eq. 2 and 3), a transfer once a batch: a row
travels to a rank once a step, however often the rank reads it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from pibroch.errors import DataError
from pibroch.kernels.arrays import Array
from pibroch.planner.kernels import profile as kernels
from pibroch.storage import storage_errors
from pibroch.untrusted import MAX_JSON_BYTES, Refusal, checked, parse_json

FORMAT = "pibroch-profile"
VERSION = 1
_HEADER = "profile"
_ACCESSES = "accesses/"
_BATCHES = "batches/"
_NEED = "a profile made by `pibroch profile`"
_REFUSAL = Refusal(DataError, "check the path, or make the profile again")
Progress = Callable[[str, float], None]


class _Header(BaseModel):
    """What a profile's file says of its counts."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["pibroch-profile"]
    version: Literal[1]
    num_samples: int = Field(ge=0)
    num_batches: int = Field(ge=0)
    batch_size: int = Field(ge=0)
    fingerprint: str
    origin: dict[str, Any]
    tables: list[str]


class NamedTable(Protocol):
    """What a profile must know of a table: a :class:`pibroch.Table` will do."""

    @property
    def name(self) -> str:
        """Of the table."""

    @property
    def num_rows(self) -> int:
        """Of the table."""


@dataclass(frozen=True, slots=True)
class TableCounts:
    """Counts of one table.

    Attributes:
        accesses: int64 ``[num_rows]``: how often each row is read.
        batches: int32 ``[num_rows]``: in how many batches it is read at least once.
    """

    accesses: NDArray[np.int64]
    batches: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AccessProfile:
    """Counts of all tables over some batches of one reader.

    Attributes:
        tables: by name.
        num_samples: that were read.
        num_batches: that they made.
        batch_size: samples of a full batch, of *one rank*.
        fingerprint: of the data that were read (``EncodedDataset.digest``), or another word for
            where the counts come from.
        origin: what a reader wants to know of the counting: split, order, extrapolation.
    """

    tables: Mapping[str, TableCounts]
    num_samples: int
    num_batches: int
    batch_size: int
    fingerprint: str
    origin: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows by table."""
        return {name: len(counts.accesses) for name, counts in self.tables.items()}

    @property
    def num_accesses(self) -> int:
        """Of all tables."""
        return sum(int(counts.accesses.sum()) for counts in self.tables.values())

    def check(self, tables: Sequence[NamedTable], fingerprint: str | None = None) -> None:
        """Raise unless the profile is of these tables, and of these data if a fingerprint is given.

        Raises:
            DataError: naming the first table that is missing or of another size, or the other data.
        """
        do = "make one with `pibroch profile` from the data that is to be trained on"
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise DataError(
                f"a profile of data {self.fingerprint[:12]}...",
                f"one of data {fingerprint[:12]}...",
                do,
            )
        for table in tables:
            if table.name not in self.tables:
                raise DataError(
                    f"a profile without table {table.name!r}", "counts for each table", do
                )
            num_rows = len(self.tables[table.name].accesses)
            if num_rows != table.num_rows:
                raise DataError(
                    f"a profile in which table {table.name!r} has {num_rows:,} rows",
                    f"{table.num_rows:,} rows",
                    do,
                )
        if not self.num_samples or not self.num_batches:
            raise DataError("a profile of no samples", "at least one batch", do)

    def save(self, path: Path) -> None:
        """Write the profile as one safetensors file, in one step.

        Raises:
            StorageError: when the disk refuses.
        """
        # it loads threads, which planning does not need
        from pibroch.state.tensor_file import write_tensors

        header = {
            "format": FORMAT,
            "version": VERSION,
            "num_samples": self.num_samples,
            "num_batches": self.num_batches,
            "batch_size": self.batch_size,
            "fingerprint": self.fingerprint,
            "origin": dict(self.origin),
            "tables": list(self.tables),
        }
        tensors: dict[str, Array] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
        for name, counts in self.tables.items():
            tensors[_ACCESSES + name] = counts.accesses
            tensors[_BATCHES + name] = counts.batches
        temporary = path.with_name(path.name + ".new")
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(temporary, tensors)
            temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> AccessProfile:
        """Read a profile.

        Raises:
            DataError: when there is none, or it is cut short, of another kind or version.
        """
        from pibroch.state.tensor_file import TensorFile  # likewise

        with TensorFile(path.parent, path.name, _REFUSAL) as file:
            if _HEADER not in file.names:
                raise _REFUSAL(f"{path}, a safetensors file of another kind", _NEED)
            data = file.mapped(_HEADER).tobytes()
            content = parse_json(data[:MAX_JSON_BYTES], f"{path}, no profile", _REFUSAL)
            header: _Header = checked(_Header, content, f"{path} at {_HEADER!r}", _REFUSAL)
            tables = {}
            for name in header.tables:
                arrays = [np.array(file.mapped(kind + name)) for kind in (_ACCESSES, _BATCHES)]
                kinds = [(each.dtype.name, each.shape) for each in arrays]
                if kinds != [("int64", arrays[0].shape[:1]), ("int32", arrays[0].shape[:1])]:
                    raise _REFUSAL(f"{path} with counts {kinds} of {name!r}", "int64, int32 [rows]")
                if any(each.min(initial=0) < 0 for each in arrays):
                    raise _REFUSAL(f"{path} with counts of {name!r} below 0", "counts")
                tables[name] = TableCounts(*arrays)
        return cls(
            tables,
            header.num_samples,
            header.num_batches,
            header.batch_size,
            header.fingerprint,
            header.origin,
        )


class ProfileCounter:
    """Counts batch by batch, in exactly 16 bytes a row.

    Args:
        num_rows: by table.
    """

    def __init__(self, num_rows: Mapping[str, int]) -> None:
        self._counts = {
            n: TableCounts(np.zeros(r, np.int64), np.zeros(r, np.int32))
            for n, r in num_rows.items()
        }
        self._last = {name: np.zeros(rows, np.int32) for name, rows in num_rows.items()}
        self.num_samples = self.num_batches = 0

    def add(self, ids: Mapping[str, Sequence[NDArray[np.int64]]], num_samples: int) -> None:
        """Count one batch: by table the ids that it reads, in one array or several.

        Raises:
            DataError: for an id outside its table.
        """
        self.num_batches += 1
        self.num_samples += num_samples
        for name, arrays in ids.items():
            counts = self._counts[name]
            for array in arrays:
                place = kernels.count_batch(
                    array, self.num_batches, counts.accesses, counts.batches, self._last[name]
                )
                if place >= 0:
                    raise DataError(
                        f"id {array[place]} for table {name!r}",
                        f"0 to {len(counts.accesses) - 1}",
                        "check the tables",
                    )

    def profile(
        self, batch_size: int, fingerprint: str, origin: Mapping[str, object] | None = None
    ) -> AccessProfile:
        """What was counted."""
        return AccessProfile(
            self._counts,
            self.num_samples,
            self.num_batches,
            batch_size,
            fingerprint,
            dict(origin or {}),
        )
