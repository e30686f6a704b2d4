"""Records of a stream to samples, by preparation's parser and encoders."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.data.batch import JaggedBatch
from pibroch.data.dataset import Bags, Split
from pibroch.data.encode import FeatureEncoder
from pibroch.data.encoded_pieces import encode_piece
from pibroch.data.layout import Layout
from pibroch.data.loader import batch_of
from pibroch.data.parquet import text_of_rows
from pibroch.data.parse import PieceParser
from pibroch.data.schema import Schema
from pibroch.data.streams.base import BadRecord, Range, Records
from pibroch.data.writer import EncodedRows
from pibroch.errors import DataError
from pibroch.kernels.arrays import Array

_SHOWN_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Decoded:
    """The good records of a range as samples, and the others."""

    rows: EncodedRows
    bad: tuple[BadRecord, ...]

    def part(self, of: Range, range: Range) -> Decoded:
        """Of what a range ``of`` gave, what one within it gives."""
        lines = [each.line for each in self.bad]  # rising
        last = range.line + range.records  # the first one is the one behind `range.line`
        num_before = bisect_right(lines, range.line)
        num_bad = bisect_right(lines, last)
        rows = self.rows.between(range.line - of.line - num_before, last - of.line - num_bad)
        return Decoded(rows, self.bad[num_before:num_bad])


class Decoder:
    """Turns records into samples.

    Args:
        schema: of the records.
        encoders: one a feature, in the schema's order.

    Raises:
        DataError: for a schema of which a stream cannot give the features.
    """

    def __init__(self, schema: Schema, encoders: Mapping[str, FeatureEncoder]) -> None:
        if built := [each.name for each in schema.categorical if each.events is not None]:
            raise DataError(
                f"`{built[0]}`, a sequence that is built from a log, in a stream",
                "a column that holds the sequence",
                "have whoever writes the stream send it, as for serving",
            )
        self.schema = schema
        self._encoders = list(encoders.values())
        self._parsers: dict[tuple[tuple[str, ...], Layout, tuple[str, ...]], PieceParser] = {}
        self._wholes: dict[str, tuple[Records, Decoded]] = {}  # the newest of each partition
        self._skipped: dict[str, set[int]] = {}

    def skip(self, places: Iterable[str]) -> None:
        """Set records aside that look good, from now on.

        Args:
            places: of each one, ``FILE:LINE``.
        """
        for place in places:
            file, _, line = place.rpartition(":")
            self._skipped.setdefault(file, set()).add(int(line))

    def decode(self, records: Records) -> Decoded:
        """The samples of a range.

        Raises:
            DataError: for columns that lack one of the schema's; names the file.
        """
        if records.whole is None:
            return self._decode(records)
        kept = self._wholes.get(records.range.partition)
        if kept is None or kept[0] is not records.whole:
            kept = records.whole, self._decode(records.whole)
            self._wholes[records.range.partition] = kept
        return kept[1].part(kept[0].range, records.range)

    def _decode(self, records: Records) -> Decoded:
        first = records.range.line + 1
        parsed = self._parser(records).parse(
            records.text, first, records.range.records, records.integers
        )
        numbers = records.numbers or range(first, first + records.range.records)
        bad = dict.fromkeys(records.bad, b"")
        bad |= {numbers[each.line - first]: each.text for each in parsed.bad}
        reasons = {numbers[each.line - first]: each.reason for each in parsed.bad}
        reasons |= records.bad
        rows = encode_piece(parsed, self._encoders)
        if skipped := self._skipped.get(records.range.file):
            of_rows = np.setdiff1d(np.array(numbers), list(reasons))
            is_skipped = np.isin(of_rows, list(skipped))
            if is_skipped.any():
                rows = rows.chosen(~is_skipped)
                texts = records.text.split(b"\n")
                for number in of_rows[is_skipped].tolist():
                    reasons[number] = "left out by `skip`"
                    bad[number] = texts[min(bisect_left(numbers, number), len(texts) - 1)]
        if records.original is not None:
            lines = records.original.split(b"\n")
            bad = {line: lines[bisect_left(numbers, line)] for line in bad}
        if records.rows is not None:
            bad = {line: text_of_rows(records.rows[line - first]).rstrip() for line in bad}
        described = tuple(
            BadRecord(
                records.range.file,
                line,
                reasons[line],
                bad[line][:_SHOWN_BYTES].decode("utf-8", "replace"),
            )
            for line in sorted(bad)
        )
        return Decoded(rows, described)

    def _parser(self, records: Records) -> PieceParser:
        key = records.columns, records.layout, records.integers.columns
        parser = self._parsers.get(key)
        if parser is None:
            try:
                parser = PieceParser(self.schema, records.columns, records.layout, integers=key[-1])
            except DataError as error:
                raise DataError(
                    f"{records.range.file} with {error.got.removeprefix('the ')}",
                    error.need,
                    "have all files of the stream the columns of the schema",
                ) from error
            self._parsers[key] = parser
        return parser

    def batch(self, rows: EncodedRows) -> JaggedBatch:
        """The batch of samples, without what belongs to them beside features and labels."""
        schema = self.schema
        split = Split(
            "stream",
            schema.keys,
            schema.dense_names,
            rows.labels,
            rows.dense,
            rows.ids,
            {name: Bags(ids, _offsets(lengths)) for name, (lengths, ids) in rows.bags.items()},
            raw_ids=rows.raw_ids,
            raw_keys=schema.single_keys(raw=True),
        )
        return batch_of(split, np.arange(len(rows.labels)))

    def joined(self, parts: Sequence[EncodedRows]) -> EncodedRows:
        """The samples of some ranges together; of none when there are no ranges."""
        if not parts:
            return self._no_rows()
        if len(parts) == 1:
            return parts[0]
        names = list(parts[0].bags)
        bags = {
            name: (
                np.concatenate([part.bags[name][0] for part in parts]),
                np.concatenate([part.bags[name][1] for part in parts]),
            )
            for name in names
        }
        return EncodedRows(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.ids for part in parts]),
            bags,
            _concatenated([part.raw_ids for part in parts]),
            _concatenated([part.sample_weights for part in parts]),
            _concatenated([part.groups for part in parts]),
            _concatenated([part.event_times for part in parts]),
        )

    def _no_rows(self) -> EncodedRows:
        columns = self.schema.log_columns()
        columns = columns if len(columns) > 1 else (*columns, "")
        return encode_piece(PieceParser(self.schema, columns).parse(b""), self._encoders)


def _concatenated(arrays: Sequence[Array | None]) -> Array | None:
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if there else None


def _offsets(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
