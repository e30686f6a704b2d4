"""Events with ids, and the files and streams that hold them."""

import gzip
import io
import json

import numpy as np
import polars as pl
import zstandard

from pibroch.data.encode import Encoders, FeatureEncoder
from pibroch.data.schema import Schema
from pibroch.data.streams.batches import Stream, StreamOptions
from pibroch.data.streams.decode import Decoder
from pibroch.data.streams.directory import Directory, FileFormat

SCHEMA = """
label = "clicked"
time = "at"
time_unit = "ms"
weight = "weight"
[dense.event]
transform = "identity"
[categorical.user]
encoding = "raw"
[categorical.tags]
encoding = "raw"
multi_hot = true
"""
COLUMNS = ("clicked", "at", "weight", "event", "user", "tags", "unread")


def schema():
    return Schema.from_toml(SCHEMA)


def events(first, last):
    """Events by number, which is also their dense value."""
    rows = []
    for number in range(first, last):
        tags = [f"t{number % 3}"] * (number % 4)
        row = (number % 2, 1000 + number, 1.0, number, f"u{number % 7}", tags, 'a, "b"')
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def csv_text(rows, separator=",", header=True):
    lines = [separator.join(COLUMNS)] if header else []
    for row in rows:
        fields = ["|".join(row["tags"]) if name == "tags" else row[name] for name in COLUMNS]
        fields[-1] = '"a, ""b"""'
        lines.append(separator.join(map(str, fields)))
    return ("\n".join(lines) + "\n").encode()


def json_text(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def file_bytes(kind, rows):
    """A file's bytes; ``kind`` is the end of its name."""
    name, _, compression = kind.partition(".")
    if name == "parquet":
        buffer = io.BytesIO()
        pl.DataFrame(rows).write_parquet(buffer, row_group_size=7)
        return buffer.getvalue()
    text = json_text(rows) if name == "jsonl" else csv_text(rows, "\t" if name == "tsv" else ",")
    if compression == "gz":
        return gzip.compress(text)
    return zstandard.compress(text) if compression == "zst" else text


def decoder():
    each = schema()
    encoders = {feature.name: FeatureEncoder(feature) for feature in each.categorical}
    return Decoder(each, Encoders(encoders))


def directory(path, partitions=1, **options):
    return Directory(path, FileFormat(schema(), **options), partitions)


def stream(
    path, batch_size=8, part=(0, 1), partitions=1, gather=None, journal=None, aside=None, **options
):
    options = StreamOptions(batch_size, **{"idle_seconds": 0.0, **options})
    source = directory(path, partitions)
    return Stream(source, decoder(), options, part, gather, journal, aside)


def numbers(batch):
    """Of the events in a batch."""
    return batch.dense[:, 0].to(int).tolist()


def all_numbers(batches):
    return [number for batch in batches for number in numbers(batch)]


def digest(batch):
    """All that a step sees of a batch."""
    tensors = (batch.dense, batch.values, batch.offsets, batch.labels, batch.sample_weights)
    return b"".join(np.ascontiguousarray(each).tobytes() for each in (*tensors, batch.event_times))
