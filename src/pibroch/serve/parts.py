"""Which rows of an export a host holds, where several split the tables.

Who wants rows asks by the protocol of :mod:`pibroch.rpc.rows`: the export's checksum and row ids
among those of all tables. A host's name is that of its part, which both ends prove: so no answer is
of other rows than those meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from pibroch.errors import ConfigError, DataError, ProtocolError
from pibroch.kernels.arrays import Bytes, Ints

if TYPE_CHECKING:
    from pibroch.rpc.rows import Give, Rows

ANSWER_TIMEOUT_S = 2.0
"""For a host to be connected to and to answer; requests that need its rows are refused then."""
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
        numbers = re.fullmatch("([0-9]{1,5})/([0-9]{1,5})", text)
        if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]) <= MOST_PARTS:
            raise ConfigError(
                f"--part {text}", f"a part of how many, at most {MOST_PARTS}", "say e.g. --part 1/2"
            )
        return cls(int(numbers[1]), int(numbers[2]))

    def of(self, num_rows: int) -> range:
        """Its rows."""
        return range(
            num_rows * (self.number - 1) // self.count, num_rows * self.number // self.count
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def worker(self) -> str:
        """The name of the host that has it."""
        return f"rows:{self.number}-of-{self.count}"


class WantedRows(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """The metadata of a request for rows, whose payload are their ids, int64 ``[V]``.

    Attributes:
        of: checksum of the export.
    """

    of: str


_decoder = msgspec.msgpack.Decoder(WantedRows)


def by_ids(rows: Callable[[str, Ints], Rows]) -> Give:
    """What gives ``rows``, by an export's checksum and ids, to whoever asks."""

    def give(_: object, wanted: bytes, ids: Bytes) -> list[Rows]:
        try:
            of = _decoder.decode(wanted).of
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a request for rows ({error})", "an export's checksum") from error
        if len(ids) % 8:
            raise ProtocolError("a request for rows without numbers", "int64 [V]")
        return [rows(of, ids.view(np.int64))]

    return give


def most_ids(row_bytes: int) -> int:
    """Of a request for rows of so many bytes."""
    return max(1, min(MOST_IDS, MOST_ANSWER_BYTES // row_bytes))


def check_ids(row_ids: Ints, rows: range, row_bytes: int) -> None:
    """Check the ids ``[V]`` of a request.

    Raises:
        DataError: for none, too many, or some outside these rows.
    """
    most = most_ids(row_bytes)
    if not 1 <= len(row_ids) <= most:
        raise DataError(f"{len(row_ids):,} row ids", f"1 to {most:,}")
    if int(np.maximum.reduce((row_ids - rows.start).view(np.uint64))) >= len(rows):
        low = int(row_ids.min())
        high = int(row_ids.max())
        raise DataError(
            f"rows {low} to {high}", f"rows from {rows.start} to {rows.stop - 1}, which are here"
        )
