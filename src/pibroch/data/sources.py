"""Raw text files, plain, gzip or zstd by their first bytes, as pieces that hold whole records.

Memory is bounded by the piece, whatever the file's size. A piece says where the next one begins, so
that reading can go on there in another process.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import zstandard

from pibroch.data.kernels.text import RECORD_ITEMS, complete_records_end, find_fields
from pibroch.data.layout import Layout
from pibroch.data.parse import BadRecord
from pibroch.errors import DataError

_READ_BYTES = 1 << 18
_GZIP_STEP_BYTES = 1 << 15
_ZSTD_STEP_BYTES = 1 << 10
"""Of a compressed file, expanded at once, to 32 MB at most."""
_EXPANDED_BYTES = 1 << 20
"""After which no further step is made until these are used, whatever the file expands to."""
_LONGEST_RECORD_PIECES = 4
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_FORMATS = {
    b"PAR1": ("a Parquet file", "use `pibroch data prepare parquet`"),
    b"\xff\xfe": ("UTF-16 text", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "convert it to UTF-8"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack it, or export it as CSV"),
    b"BZh": ("compressed by bzip2", "unpack it, or compress it with gzip or zstd"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it, or compress it with gzip or zstd"),
    b"ARROW1": ("an Arrow file", "convert it to Parquet"),
    b"ORC": ("an ORC file", "convert it to Parquet"),
    b"Obj\x01": ("an Avro file", "convert it to Parquet"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a source between two records.

    Attributes:
        offset: bytes of (uncompressed) text, or rows of a Parquet file, before it.
        line: lines before it, the header's among them.
    """

    offset: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Whole records as text, where they begin, and where the next piece begins.

    ``bad`` are records that could not become text, in whose place is a blank line.
    """

    text: bytes
    start: Place
    end: Place
    fraction: float
    bad: tuple[BadRecord, ...] = ()


class RawSource(Protocol):
    """A file of records.

    One that reads further files has them as ``more_files``, a tuple: preparation goes on where it
    was interrupted only while none of them has changed.

    Attributes:
        path: of the file.
        columns: names of the columns of the text, in their order.
        layout: of the text.
    """

    path: Path
    columns: tuple[str, ...]
    layout: Layout

    def pieces(self, start: Place, piece_bytes: int) -> Iterator[TextPiece]:
        """Whole records from ``start`` on, in pieces of about ``piece_bytes``."""
        ...


class TextSource:
    """Delimited text, compressed or not.

    Args:
        path: the file.
        separator: the byte between columns.
        quotes: whether fields may be quoted.
        columns: names of the columns where the file has no header.

    Raises:
        DataError: when the file is missing, a folder, empty, damaged, or no text.
    """

    def __init__(
        self, path: Path, separator: str, quotes: bool, columns: tuple[str, ...] | None = None
    ) -> None:
        self.path = path
        self.layout = Layout(separator, quotes)
        self._size = existing(path).stat().st_size
        self._start = Place()
        self._refuse_other_formats(columns)
        if columns is not None:
            self.columns = columns
            return
        header = next(self._lines(1), b"")
        self.columns = tuple(split_record(header, separator, quotes))
        self._start = Place(len(header), 1)

    def first_records(self, count: int) -> list[list[str]]:
        """The fields of the first lines, with the header's; quoted newlines are not honoured."""
        return [
            split_record(line, self.layout.separator, self.layout.quotes)
            for line in self._lines(count)
        ]

    def pieces(self, start: Place, piece_bytes: int) -> Iterator[TextPiece]:
        """See :class:`RawSource`.

        Going on in a compressed file reads it from its start without parsing.

        Raises:
            DataError: when the file is damaged or one record is longer than four pieces; names the
                line where it begins.
        """
        start = max(start, self._start, key=lambda place: place.offset)
        with self.path.open("rb") as file:
            stream = Uncompressed(file, self.path)
            stream.skip(start.offset)
            rest = b""
            while True:
                block = stream.read(piece_bytes)
                is_last = len(block) < piece_bytes
                data = rest + block
                end = len(data) if is_last else self._records_end(data)
                if end == 0 and not is_last and len(data) >= _LONGEST_RECORD_PIECES * piece_bytes:
                    raise DataError(
                        f"a record of more than {len(data):,} bytes that begins in line"
                        f" {start.line + 1} of {self.path}",
                        "records of ordinary length",
                        "look there for an opening quote that is never closed",
                    )
                if end:
                    text = data[:end]
                    rest = data[end:]
                    next_place = Place(start.offset + end, start.line + text.count(b"\n"))
                    yield TextPiece(
                        text, start, next_place, min(1.0, file.tell() / max(1, self._size))
                    )
                    start = next_place
                else:
                    rest = data
                if is_last:
                    return

    def _records_end(self, data: bytes) -> int:
        if self.layout.quotes and b'"' in data:
            return int(
                complete_records_end(np.frombuffer(data, np.uint8), ord(self.layout.separator))
            )
        return data.rfind(b"\n") + 1

    def _refuse_other_formats(self, columns: tuple[str, ...] | None) -> None:
        with self.path.open("rb") as file:
            begin = Uncompressed(file, self.path).read(_READ_BYTES)
        for magic, (kind, do) in _OTHER_FORMATS.items():
            if begin.startswith(magic):
                raise DataError(
                    f"{self.path}, which is {kind}", "delimited text, plain or by gzip or zstd", do
                )
        first = begin.partition(b"\n")[0]
        if b"\0" in first:
            raise DataError(
                f"{self.path}, which has zero bytes in its first line",
                "delimited text in UTF-8",
                "check the file's format",
            )
        split = self.layout.separator, self.layout.quotes
        if columns and tuple(split_record(first, *split)) == columns:
            raise DataError(
                f"{self.path}, whose first line has the names of the columns",
                "none where the schema's `columns` names them",
                "leave `columns` out of the schema, or the line out of the file",
            )

    def _lines(self, count: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            stream = Uncompressed(file, self.path)
            data = stream.read(_READ_BYTES)
        if not data.strip():
            raise DataError(
                f"{self.path}, which is empty", "at least one record", "check how the file was made"
            )
        yield from islice(io.BytesIO(data), count)


class _Decoder(Protocol):
    @property
    def unused_data(self) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    def decompress(self, data: bytes | memoryview, /) -> bytes: ...


class Uncompressed:
    """The uncompressed bytes of a file, which may grow while it is read.

    Args:
        file: opened, at its start.
        path: for messages.
        block_bytes: read at once.
    """

    def __init__(self, file: BinaryIO, path: Path, block_bytes: int = _READ_BYTES) -> None:
        magic = file.read(4)
        file.seek(0)
        self._file = file
        self._path = path
        self._block_bytes = block_bytes
        self._packed = memoryview(b"")  # of the file, not expanded yet
        self._decoder: _Decoder | None = None
        self._new_decoder: Callable[[], _Decoder] | None = None
        if magic.startswith(_GZIP):
            self._new_decoder = lambda: zlib.decompressobj(wbits=31)
            self._step_bytes = _GZIP_STEP_BYTES
        elif magic == _ZSTD:
            self._new_decoder = lambda: zstandard.ZstdDecompressor().decompressobj()
            self._step_bytes = _ZSTD_STEP_BYTES
        begin = self.more()
        self._left = begin.removeprefix(BYTE_ORDER_MARK)
        self._mark_bytes = len(begin) - len(self._left)

    @property
    def is_complete(self) -> bool:
        """Whether what was read so far may be all: no compressed part was begun and not ended."""
        return self._decoder is None and not self._packed

    def skip(self, num_bytes: int) -> None:
        """Go forward; of a file that is not compressed, and of which nothing was read, at once."""
        if self._new_decoder is None and num_bytes >= len(self._left):
            self._file.seek(num_bytes + self._mark_bytes)
            self._left = b""
            return
        while num_bytes > 0:
            skipped = self.read(min(num_bytes, 16 * _READ_BYTES))
            if not skipped:
                return
            num_bytes -= len(skipped)

    def read(self, num_bytes: int) -> bytes:
        """The next ``num_bytes``, fewer only at the end.

        Raises:
            DataError: for a compressed file that is damaged, or stops too early.
        """
        parts = [self._left]
        size = len(self._left)
        while size < num_bytes:
            block = self.more()
            if not block:
                self._refuse_incomplete()
                break
            parts.append(block)
            size += len(block)
        data = b"".join(parts)
        self._left = data[num_bytes:]
        return data[:num_bytes]

    def more(self) -> bytes:
        """Some of what comes next; empty at the end of what is there now.

        Not what :meth:`read` has left, for which see :meth:`rest`.
        """
        if self._new_decoder is None:
            return self._file.read(self._block_bytes)
        while self._packed or (block := self._file.read(self._block_bytes)):
            self._packed = self._packed or memoryview(block)
            if data := self._decoded(self._new_decoder):
                return data
        return b""

    def rest(self) -> bytes:
        """What was read from the file and not yet given out; it counts as given out now."""
        rest = self._left
        self._left = b""
        return rest

    def _decoded(self, new_decoder: Callable[[], _Decoder]) -> bytes:
        """Some of what the packed bytes hold; the others stay packed."""
        parts = []
        size = 0
        while self._packed and size < _EXPANDED_BYTES:
            if self._decoder is None:  # zeros between and after gzip members are padding
                self._packed = memoryview(bytes(self._packed).lstrip(b"\0"))
                if not self._packed:
                    break
            step = self._packed[: self._step_bytes]
            decoder = self._decoder = self._decoder or new_decoder()
            try:
                parts.append(decoder.decompress(step))
            except (zlib.error, zstandard.ZstdError) as error:
                raise self._damaged(f"damaged near byte {self._file.tell():,}: {error}") from error
            size += len(parts[-1])
            self._packed = self._packed[len(step) - len(decoder.unused_data) :]
            if decoder.eof:
                self._decoder = None
        return b"".join(parts)

    def _refuse_incomplete(self) -> None:
        if self._decoder is not None:
            raise self._damaged(f"which ends too early, after {self._file.tell():,} bytes")

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self._path}, {what}", "a complete compressed file", "copy or download it again"
        )


def existing(path: Path) -> Path:
    """The path of a file that is there, else a DataError."""
    if not path.is_file():
        got = f"{path}, which is a folder" if path.is_dir() else f"no file {path}"
        raise DataError(got, "a readable file", "check the path")
    return path


def split_record(line: bytes, separator: str, quotes: bool) -> list[str]:
    """The fields of one line.

    >>> split_record(b'a,"b,c",d', ",", True)
    ['a', 'b,c', 'd']
    """
    buffer = np.frombuffer(line.rstrip(b"\r\n"), np.uint8).copy()
    num_columns = line.count(separator.encode()) + 1
    bounds = np.zeros((line.count(b"\n") + 1, num_columns, 2), np.int64)
    records = np.zeros((len(bounds), RECORD_ITEMS), np.int64)
    find_fields(buffer, ord(separator), quotes, np.arange(num_columns), bounds, records)
    fields = bounds[0, : max(1, records[0, 2])].tolist()
    return [buffer[start:end].tobytes().decode("utf-8", "replace") for start, end in fields]
