import gzip
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard

from pibroch.data.sources import Place, RawSource, TextSource, Uncompressed
from pibroch.errors import DataError

LINES = [f'{i},"a ""{i}"" b\nc",{i * i}\n' for i in range(500)]
TEXT = ("x,y,z\n" + "".join(LINES)).encode()


def text_of(source: RawSource, start: Place = Place(), piece_bytes: int = 300) -> bytes:
    return b"".join(piece.text for piece in source.pieces(start, piece_bytes))


def written(path: Path, kind: str, data: bytes = TEXT) -> Path:
    if kind == "gzip":
        # two members, as `cat a.gz b.gz` makes
        data = gzip.compress(data[:100]) + gzip.compress(data[100:])
    elif kind == "zstd":
        compress = zstandard.ZstdCompressor(write_checksum=True).compress
        data = compress(data[:100]) + compress(data[100:])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd"])
def test_kinds_are_told_apart_by_content(tmp_path, kind):
    source = TextSource(written(tmp_path / "data.txt", kind), ",", True)
    assert source.columns == ("x", "y", "z")
    assert text_of(source) == TEXT[6:]


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd"])
def test_pieces_hold_whole_records_and_reading_goes_on_anywhere(tmp_path, kind):
    source = TextSource(written(tmp_path / "data", kind), ",", True)
    pieces = list(source.pieces(Place(), 300))
    assert len(pieces) > 20
    assert pieces[0].start == Place(6, 1)
    for piece in pieces:
        assert piece.text.count(b'"') % 2 == 0
        assert len(piece.text) < 600
    for piece in pieces[::7]:
        before = TEXT[: piece.end.offset]
        assert piece.end.line == before.count(b"\n")
        assert text_of(source, piece.end) == TEXT[piece.end.offset :]


def test_a_file_without_header_a_byte_order_mark_and_no_last_newline(tmp_path):
    path = written(tmp_path / "data", "plain", b"\xef\xbb\xbfa\tb\n1\t2")
    assert text_of(TextSource(path, "\t", False, ("p", "q"))) == b"a\tb\n1\t2"
    assert TextSource(path, "\t", False).columns == ("a", "b")
    assert text_of(TextSource(path, "\t", False)) == b"1\t2"


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_truncated_and_damaged_compression_is_an_error(tmp_path, kind):
    path = written(tmp_path / "whole", kind)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"whole, which ends too early.*need a complete"):
        text_of(TextSource(path, ",", True, ("x", "y", "z")))
    path.write_bytes(whole[:200] + bytes(100) + whole[300:])
    with pytest.raises(DataError, match="whole"):
        text_of(TextSource(path, ",", True, ("x", "y", "z")))


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_compressed_line_without_end_is_not_read_to_its_end(tmp_path, kind):
    """A hundred megabytes in a file of some kilobytes."""
    packer = {
        "gzip": zlib.compressobj(1, wbits=31),
        "zstd": zstandard.ZstdCompressor().compressobj(),
    }[kind]
    packed = packer.compress(b"1,2,3\n") + packer.compress(b"x" * (100 << 20)) + packer.flush()
    path = tmp_path / "long"
    path.write_bytes(packed)
    tracemalloc.start()
    try:
        source = TextSource(path, ",", False, ("x", "y", "z"))
        with pytest.raises(DataError, match=r"more than .* bytes that begins in line 2"):
            text_of(source, piece_bytes=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20
    with path.open("rb") as file:
        stream = Uncompressed(file, path)
        stream.skip(100 << 20)
        assert stream.read(1 << 20) == b"xxxxxx" and stream.is_complete


def test_missing_folder_and_empty(tmp_path):
    with pytest.raises(DataError, match=r"no file .*nope.*need.*do:"):
        TextSource(tmp_path / "nope", ",", True)
    with pytest.raises(DataError, match="is a folder"):
        TextSource(tmp_path, ",", True)
    with pytest.raises(DataError, match="empty"):
        TextSource(written(tmp_path / "empty", "plain", b""), ",", True)


def test_a_quote_that_never_closes_does_not_fill_the_memory(tmp_path):
    path = written(tmp_path / "data", "plain", b'a,b\n1,"' + b"x\n" * 5000)
    with pytest.raises(DataError, match="quote that is never closed"):
        text_of(TextSource(path, ",", True))


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (b"PAR1\x15\x04", "which is a Parquet file.*pibroch data prepare parquet"),
        ("y,x\n1,2\n".encode("utf-16"), "which is UTF-16 text.*convert it to UTF-8"),
        (b"PK\x03\x04", "a zip archive or a spreadsheet"),
        (b"y,x\x00\n1,2", "zero bytes in its first line"),
    ],
)
@pytest.mark.parametrize("columns", [None, ("y", "x")])
def test_other_formats_are_named_not_printed(tmp_path, begin, message, columns):
    with pytest.raises(DataError, match=message) as caught:
        TextSource(written(tmp_path / "data", "gzip", begin), ",", True, columns)
    assert str(caught.value).isprintable()


def test_a_record_without_end_is_named_by_the_line_where_it_begins(tmp_path):
    path = written(tmp_path / "data", "plain", b'a,b\n1,2\n3,4\n1,"' + b"x\n" * 5000)
    with pytest.raises(DataError, match="begins in line 4 of"):
        text_of(TextSource(path, ",", True))
