"""Which rows of an export a host holds, where several split the tables, and requests for them.

Who wants rows opens a connection by ``GET /rows/K-of-N`` with ``Upgrade: pibroch-rows``; from then
on it carries requests and answers in turn, all numbers little-endian. A request is the export's
checksum (32 bytes), a count (uint32) and so many row ids among those of all tables (int64). An
answer is a status as of HTTP (uint16), a number of bytes (uint32) and these bytes: the rows as the
export has them, one behind the other, or in the place of 200 the reason. Part and export are named,
so no answer is of other rows than those meant.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError, DataError
from pibroch.kernels.arrays import Ints

ROWS_PATH = "/rows/"
PROTOCOL = "pibroch-rows"
REQUEST = struct.Struct("<32sI")
ANSWER = struct.Struct("<HI")
"""What comes before the ids of a request, and before the bytes of an answer."""
MOST_PARTS = 1024
MOST_ANSWER_BYTES = 32 << 20
MOST_IDS = 1 << 17
"""Of a request, whose answer is also at most :data:`MOST_ANSWER_BYTES`.

Who wants more asks several times at once.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` of ``count``, from 1: consecutive rows among those of all tables.

    >>> [Part(number, 3).of(10) for number in (1, 2, 3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``1/2``.

        Raises:
            ConfigError: for another form.
        """
        number, _, count = text.partition("/")
        digits = all(
            each.isascii() and each.isdecimal() and len(each) < 6 for each in (number, count)
        )
        if not digits or not 1 <= int(number) <= int(count) <= MOST_PARTS:
            raise ConfigError(
                f"--part {text}", f"a part of how many, at most {MOST_PARTS}", "say e.g. --part 1/2"
            )
        return cls(int(number), int(count))

    def of(self, num_rows: int) -> range:
        """Its rows."""
        return range(
            num_rows * (self.number - 1) // self.count, num_rows * self.number // self.count
        )

    @property
    def in_paths(self) -> str:
        """As requests name it."""
        return f"{self.number}-of-{self.count}"

    @property
    def path(self) -> str:
        """Where connections for its rows are opened."""
        return f"{ROWS_PATH}{self.in_paths}"


def most_ids(row_bytes: int) -> int:
    """Of a request for rows of so many bytes."""
    return max(1, min(MOST_IDS, MOST_ANSWER_BYTES // row_bytes))


def request_of(sha256: str, row_ids: Ints) -> bytes:
    """A request for rows of an export, by the checksum in its manifest."""
    return (
        REQUEST.pack(bytes.fromhex(sha256), len(row_ids))
        + row_ids.astype("<i8", copy=False).tobytes()
    )


def ids_of_bytes(body: bytes, rows: range, row_bytes: int) -> NDArray[np.int64]:
    """The ids ``[V]`` in a request's body.

    Raises:
        DataError: for what is none, too much, or outside these rows.
    """
    most = most_ids(row_bytes)
    if not body or len(body) % 8 or len(body) > 8 * most:
        raise DataError(f"a body of {len(body):,} bytes", f"1 to {most:,} row ids of 8 bytes")
    row_ids = np.frombuffer(body, "<i8").astype(np.int64, copy=False)
    if int((row_ids - rows.start).view(np.uint64).max()) >= len(rows):
        low = int(row_ids.min())
        high = int(row_ids.max())
        raise DataError(
            f"rows {low} to {high}", f"rows from {rows.start} to {rows.stop - 1}, which are here"
        )
    return row_ids
