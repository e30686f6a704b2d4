"""Codes to rows: the one path from a raw value to the row of its table, in preparation and in serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pibroch.data.parse import Fields, item_codes
from pibroch.data.schema import CategoricalFeature
from pibroch.data.text import EMPTY_CODE, parse_numbers
from pibroch.data.transform import FIRST_ROW, MISSING_ROW, UNKNOWN_ROW, log_bin_rows
from pibroch.errors import DataError
from pibroch.kernels.policy import kernel

_EMPTY_SLOT = -1
LISTS = (list, tuple, np.ndarray)
STACKED_BYTES = 8 << 20
"""Of the codes in small dictionaries, of which a process has copies, with half as much or as much again for their index."""


class FeatureEncoder:
    """Turns one feature's values into rows of its table.

    Args:
        feature: what the schema says of it.
        vocabulary: the codes of rows 2, 3, ... as uint64; ``None`` unless the encoding is a vocabulary.
        slots: :func:`index_of` the vocabulary, where somebody has made it before; made on first use when absent.
    """

    def __init__(
        self,
        feature: CategoricalFeature,
        vocabulary: NDArray[np.uint64] | None = None,
        slots: NDArray[np.int32] | None = None,
    ) -> None:
        self.feature = feature
        self._slots = slots
        self._vocabulary = vocabulary
        fixed = feature.fixed_num_rows
        self.num_rows: int = (
            fixed
            if fixed is not None
            else FIRST_ROW + (0 if vocabulary is None else len(vocabulary))
        )
        if fixed is None and vocabulary is None:
            raise DataError(
                f"no vocabulary for `{feature.name}`",
                "the one counted by `pibroch data prepare`",
                "prepare the dataset again",
            )

    def rows(self, codes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Rows of codes ``[V]``: 0 for unknown, 1 for missing."""
        if self.feature.binning is not None or self.feature.encoding == "integer":
            return codes.astype(np.int32)
        if self.feature.encoding == "hash":
            rows = FIRST_ROW + codes % np.uint64(self.feature.num_buckets or 1)
            return np.where(codes == EMPTY_CODE, MISSING_ROW, rows).astype(np.int32)
        assert self._vocabulary is not None
        if self._slots is None:
            self._slots = index_of(self._vocabulary)
        rows_found: NDArray[np.int32] = _look_up(codes, self._vocabulary, self._slots, EMPTY_CODE)
        return rows_found

    def encode(
        self, values: Iterable[object]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
        """Rows of raw values, and ids per value where the feature is multi-hot (else ``None``).

        ``None`` and the empty string are missing. A multi-hot value is a list, whose items are taken as they are, or text with
        the feature's delimiter.

        Raises:
            DataError: when a binned feature gets what is no finite number, or a feature that is not multi-hot a list.
        """
        if self.feature.binning is not None:
            return log_bin_rows(raw_numbers(self.feature.column, values)).astype(np.int32), None
        if not self.feature.multi_hot:
            return self.rows(item_codes(self.feature, fields_of(self.feature.column, values))), None
        bags = [_items(value, self.feature.delimiter) for value in values]
        fields = fields_of(self.feature.column, [item for bag in bags for item in bag])
        return self.rows(item_codes(self.feature, fields)), np.array(
            [len(bag) for bag in bags], np.int64
        )


class Encoders(dict[str, FeatureEncoder]):
    """Encoders by feature, and one look at the dictionaries of many of them where these are small.

    A request of one row asks every dictionary for one value: a kernel call each would cost several times what it does.
    """

    @cached_property
    def stacked(self) -> StackedVocabularies:
        """The small dictionaries, one behind the other."""
        found = {
            name: encoder._vocabulary
            for name, encoder in self.items()
            if encoder.feature.encoding == "vocabulary"
        }
        return StackedVocabularies({
            name: codes for name, codes in found.items() if codes is not None and codes.nbytes <= STACKED_BYTES // len(found)
        })  # fmt: skip


class StackedVocabularies:
    """Copies of some dictionaries in one array, with their hash tables in another."""

    def __init__(self, codes: Mapping[str, NDArray[np.uint64]]) -> None:
        self._place = {name: place for place, name in enumerate(codes)}
        slots = [index_of(each) for each in codes.values()]
        self._codes = np.concatenate([np.empty(0, np.uint64), *codes.values()])
        self._slots = np.concatenate([np.empty(0, np.int32), *slots])
        self._first_code = np.cumsum([0, *(len(each) for each in codes.values())], dtype=np.int64)
        self._first_slot = np.cumsum([0, *(len(each) for each in slots)], dtype=np.int64)

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def rows(self, names: Sequence[str], codes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Rows of codes ``[F, B]`` of some features, as of :meth:`FeatureEncoder.rows`."""
        places = np.array([self._place[name] for name in names], np.int64)
        bounds = self._first_code, self._first_slot
        found: NDArray[np.int64] = _look_up_stacked(
            codes, places, self._codes, self._slots, *bounds, EMPTY_CODE
        )
        return found


def raw_numbers(column: str, values: Iterable[object]) -> NDArray[np.float64]:
    """Numbers given as such or as text, float64 ``[B]``; NaN where the value is ``None`` or empty.

    Raises:
        DataError: when a value is no finite number; names ``column``, the sample and the value.
    """
    values = list(values)
    numbers, good = parse_numbers(*fields_of(column, values))
    if not good.all():
        wrong = int(np.flatnonzero(~good)[0])
        raise DataError(
            f"`{str(values[wrong])[:40]}` as {column} of sample {wrong}",
            "a finite number",
            "correct the value, or send None for missing",
        )
    found: NDArray[np.float64] = numbers
    return found


def fields_of(column: str, values: Iterable[object]) -> Fields:
    """Values as fields of one text: the text, starts and ends."""
    values = list(values)
    if lists := [place for place, value in enumerate(values) if isinstance(value, LISTS)]:
        need = "one value a sample, or `multi_hot = true` in the schema"
        raise DataError(
            f"a list as {column} of sample {lists[0]}", need, "correct the value or the schema"
        )
    texts = [raw_text(value) for value in values]
    borders = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)
    return np.frombuffer(b"".join(texts) or b" ", np.uint8), borders[:-1], borders[1:]


def _items(value: object, delimiter: str) -> Sequence[object]:
    if isinstance(value, LISTS):
        return list(value)
    text = raw_text(value)
    return text.split(delimiter.encode()) if text else []


def raw_text(value: object) -> bytes:
    """A single value as a text file would hold it; bytes are such a text.

    Raises:
        DataError: for what cannot be written as UTF-8.

    >>> raw_text(None), raw_text(True), raw_text(1.5)
    (b'', b'1', b'1.5')
    """
    if isinstance(value, bytes):
        return value
    if value is None:
        return b""
    if isinstance(value, bool):
        return b"1" if value else b"0"
    try:
        return str(value).encode()
    except (
        ValueError
    ) as error:  # half a character of UTF-16, or a whole number of thousands of digits
        raise DataError(
            f"a value that is no text: {error}", "UTF-8", "correct the value"
        ) from error


def index_of(vocabulary: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The hash table that finds a code's place in a vocabulary, int32 ``[slots]``, two to four slots a code."""
    slots: NDArray[np.int32] = _hash_table(vocabulary, _num_slots(len(vocabulary)))
    return slots


def _num_slots(count: int) -> int:
    return 1 << max(4, (2 * count).bit_length())


@kernel
def _hash_table(vocabulary: NDArray[np.uint64], num_slots: int) -> NDArray[np.int32]:
    """Open addressing: slot ``code mod num_slots`` or the next free one holds the code's index."""
    slots = np.full(num_slots, _EMPTY_SLOT, np.int32)
    mask = np.uint64(num_slots - 1)
    for index in range(len(vocabulary)):
        slot = vocabulary[index] & mask
        while slots[slot] != _EMPTY_SLOT:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = index
    return slots


@kernel
def _look_up(
    codes: NDArray[np.uint64],
    vocabulary: NDArray[np.uint64],
    slots: NDArray[np.int32],
    missing: np.uint64,
) -> NDArray[np.int32]:
    rows = np.empty(len(codes), np.int32)
    mask = np.uint64(len(slots) - 1)
    for i in range(len(codes)):
        rows[i] = UNKNOWN_ROW
        if codes[i] == missing:
            rows[i] = MISSING_ROW
            continue
        slot = codes[i] & mask
        while slots[slot] != _EMPTY_SLOT:
            if vocabulary[slots[slot]] == codes[i]:
                rows[i] = FIRST_ROW + slots[slot]
                break
            slot = (slot + np.uint64(1)) & mask
    return rows


@kernel
def _look_up_stacked(
    codes: NDArray[np.uint64],
    places: NDArray[np.int64],
    vocabularies: NDArray[np.uint64],
    slots: NDArray[np.int32],
    first_code: NDArray[np.int64],
    first_slot: NDArray[np.int64],
    missing: np.uint64,
) -> NDArray[np.int64]:
    """As :func:`_look_up` of each feature's codes ``[F, B]`` in the dictionary at its place."""
    rows = np.empty(codes.shape, np.int64)
    for feature in range(len(places)):
        place = places[feature]
        vocabulary = vocabularies[first_code[place] : first_code[place + 1]]
        found = _look_up(
            codes[feature], vocabulary, slots[first_slot[place] : first_slot[place + 1]], missing
        )
        rows[feature] = found
    return rows
