"""Codes to ids: one path from a raw value to its row or key, in preparation and in serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.text import EMPTY_CODE, parse_numbers
from pibroch.data.kernels.vocabulary import (
    EMPTY_SLOT,
    first_not_found,
    hash_table,
    look_up,
    look_up_stacked,
)
from pibroch.data.parse import Fields, item_codes, without_nulls
from pibroch.data.schema import CategoricalFeature
from pibroch.data.transform import FIRST_ROW, MISSING_ROW, bin_rows
from pibroch.data.values import NO_TEXT, TEXT_RULES, is_list, text_of
from pibroch.errors import DataError
from pibroch.kernels import parallel
from pibroch.kernels.arrays import Array

CODES_PER_THREAD = 1 << 16
MOST_USED_SLOTS = 4096
"""In a row, of a hash table; of codes that are hashes some 100 are, in tables of any size."""
STACKED_BYTES = 8 << 20
"""Of the codes in small dictionaries, of which a process has copies.

Their index takes half as much or as much again.
"""
MISSING_KEY = int(EMPTY_CODE) >> 1
"""The key of a missing value among raw ids, 8640173135264257171: that of the empty text."""


def raw_ids(codes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The keys of raw ids, int64 ``[V]`` and not negative: the upper 63 bits of codes ``[V]``.

    Codes are hashes of texts. So a number is no key by itself: 12, 12.0 and "12" are one value here
    as everywhere.
    """
    return (codes >> np.uint64(1)).view(np.int64)


def is_known(feature: CategoricalFeature, ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ids ``[V]`` of a feature are those of a value, neither unknown nor missing.

    >>> is_known(CategoricalFeature(name="film", column="film"), np.array([5, 0, 1, 2]))
    array([ True, False, False,  True])
    """
    if feature.is_raw:
        return np.asarray(ids != MISSING_KEY)
    return np.asarray(ids >= FIRST_ROW)


class FeatureEncoder:
    """Turns one feature's values into ids: rows of its table, or keys where the ids are raw.

    Args:
        feature: what the schema says of it.
        vocabulary: the codes of rows 2, 3, ... as uint64; ``None`` unless the encoding is a
            vocabulary.
        slots: :func:`index_of` the vocabulary, where somebody has made it before; made on first use
            when absent.
        text_rules: the schema's.
        nulls: the schema's texts of missing values.
    """

    def __init__(
        self,
        feature: CategoricalFeature,
        vocabulary: NDArray[np.uint64] | None = None,
        slots: NDArray[np.int32] | None = None,
        text_rules: int = TEXT_RULES,
        nulls: tuple[bytes, ...] = (),
    ) -> None:
        self.feature = feature
        self._text_rules = text_rules
        self._nulls = nulls
        self._slots = slots
        self._vocabulary = vocabulary
        self.num_rows: int | None = feature.fixed_num_rows
        if vocabulary is not None and feature.has_vocabulary:
            self.num_rows = FIRST_ROW + len(vocabulary)
        elif feature.has_vocabulary:
            raise DataError(
                f"no vocabulary for `{feature.name}`",
                "the one counted by `pibroch data prepare`",
                "prepare the dataset again",
            )

    def ids(self, codes: NDArray[np.uint64]) -> NDArray[np.int32] | NDArray[np.int64]:
        """Ids of codes ``[V]``: rows, 0 for unknown and 1 for missing, or int64 keys."""
        if self.feature.is_raw:
            return raw_ids(codes)
        if self.feature.binning is not None or self.feature.encoding == "integer":
            return codes.astype(np.int32)
        if self.feature.encoding == "hash":
            rows = FIRST_ROW + codes % np.uint64(self.feature.num_buckets or 1)
            return np.where(codes == EMPTY_CODE, MISSING_ROW, rows).astype(np.int32)
        assert self._vocabulary is not None
        if self._slots is None:
            self._slots = index_of(self._vocabulary)
        return look_up(codes, self._vocabulary, self._slots, EMPTY_CODE)

    def encode(
        self, values: Iterable[object]
    ) -> tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.int64] | None]:
        """Ids of raw values, and ids per value where the feature is multi-hot (else ``None``).

        ``None``, NaN and the empty string are missing. A multi-hot value is a list (or what else
        holds several), whose items are taken as they are, or text with the feature's delimiter.

        Raises:
            DataError: for a value that is no single one, a list where the feature is not multi-hot,
                or no finite number where it is binned; names the column and the sample.
        """
        feature = self.feature
        rules = self._text_rules
        if feature.binning is not None:
            numbers = raw_numbers(feature.column, values, rules, self._nulls)
            return bin_rows(numbers, feature.binning).astype(np.int32), None
        if not feature.multi_hot:
            fields = fields_of(texts_of(feature.column, values, rules))
            return self.ids(item_codes(feature, without_nulls(fields, self._nulls), rules)), None
        bags = [self._items(sample, value) for sample, value in enumerate(values)]
        if feature.max_length is not None:
            bags = [bag[-feature.max_length :] for bag in bags]
        fields = fields_of([item for bag in bags for item in bag])
        lengths = np.array([len(bag) for bag in bags], np.int64)
        return self.ids(item_codes(feature, without_nulls(fields, self._nulls), rules)), lengths

    def _items(self, sample: int, value: object) -> list[bytes]:
        """The texts of the items of a multi-hot value."""
        column = self.feature.column
        if is_list(value):
            return [_placed(item, column, sample, self._text_rules) for item in value]  # type: ignore[attr-defined]
        text = _placed(value, column, sample, self._text_rules)
        is_missing = not text or text in self._nulls
        return [] if is_missing else text.split(self.feature.delimiter.encode())


class Encoders(dict[str, FeatureEncoder]):
    """Encoders by feature, which look into many small dictionaries by one call of a kernel.

    A request of one row has one value for each dictionary, and a call for each would cost several
    times as much.
    """

    @cached_property
    def stacked(self) -> StackedVocabularies:
        """The small dictionaries, one behind the other."""
        vocabularies = {
            name: (encoder._vocabulary, encoder._slots)
            for name, encoder in self.items()
            if encoder.feature.has_vocabulary and encoder._vocabulary is not None
        }
        most = STACKED_BYTES // max(1, len(vocabularies))
        return StackedVocabularies(
            {name: each for name, each in vocabularies.items() if each[0].nbytes <= most}
        )


class StackedVocabularies:
    """Copies of some dictionaries in one array, and their hash tables in another."""

    def __init__(
        self, vocabularies: Mapping[str, tuple[NDArray[np.uint64], NDArray[np.int32] | None]]
    ) -> None:
        self._place = {name: place for place, name in enumerate(vocabularies)}
        codes = [codes for codes, _ in vocabularies.values()]
        slots = [
            index_of(codes) if slots is None else slots for codes, slots in vocabularies.values()
        ]
        self._codes = np.concatenate([np.empty(0, np.uint64), *codes])
        self._slots = np.concatenate([np.empty(0, np.int32), *slots])
        self._first_code = np.cumsum([0, *(len(each) for each in codes)], dtype=np.int64)
        self._first_slot = np.cumsum([0, *(len(each) for each in slots)], dtype=np.int64)

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def rows(self, names: Sequence[str], codes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Rows of codes ``[F, B]`` of some features, as of :meth:`FeatureEncoder.ids`."""
        places = np.array([self._place[name] for name in names], np.int64)
        bounds = self._first_code, self._first_slot
        return look_up_stacked(codes, places, self._codes, self._slots, *bounds, EMPTY_CODE)


def raw_numbers(
    column: str,
    values: Iterable[object],
    rules: int = TEXT_RULES,
    nulls: tuple[bytes, ...] = (),
) -> NDArray[np.float64]:
    """Numbers given as such or as text, float64 ``[B]``; NaN where the value is missing.

    Raises:
        DataError: when a value is no finite number; names ``column``, the sample and the value.
    """
    values = list(values)
    fields = fields_of(texts_of(column, values, rules))
    numbers, good = parse_numbers(*without_nulls(fields, nulls))
    if not good.all():
        wrong = int(np.flatnonzero(~good)[0])
        raise DataError(
            f"`{str(values[wrong])[:40]}` as {column} of sample {wrong}",
            "a finite number",
            "correct the value, or send None for missing",
        )
    return numbers


def texts_of(column: str, values: Iterable[object], rules: int = TEXT_RULES) -> list[bytes]:
    """Single values as :func:`text_of` writes them.

    Raises:
        DataError: for what has no text; names the column and the sample.
    """
    values = list(values)
    try:
        return [v.encode() if type(v) is str else text_of(v, rules) for v in values]
    except NO_TEXT:
        for sample, value in enumerate(values):
            _placed(value, column, sample, rules)
        raise


def _placed(value: object, column: str, sample: int, rules: int) -> bytes:
    """The text of a value.

    Raises:
        DataError: when it has none.
    """
    try:
        return text_of(value, rules)
    except NO_TEXT as error:
        where = f"as {column} of sample {sample}"
        if not isinstance(error, TypeError):  # half a character, or thousands of digits
            got = f"a value that is no text {where}: {error}"
            raise DataError(got, "UTF-8", "correct the value") from error
        raise DataError(
            f"{error} {where}",
            "one value: text, a number, a truth value, a time, or None",
            "convert it, or set `multi_hot = true` in the schema for lists of such",
        ) from error


def fields_of(texts: Sequence[bytes]) -> Fields:
    """Texts as fields of one text: the text, starts and ends."""
    borders = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=borders[1:])
    return np.frombuffer(b"".join(texts) or b" ", np.uint8), borders[:-1], borders[1:]


def index_of(vocabulary: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The hash table that finds a code's place in a vocabulary, int32 ``[slots]``.

    It has two to four slots a code.
    """
    return hash_table(vocabulary, _num_slots(len(vocabulary)))


def index_problem(vocabulary: Array, slots: Array) -> str:
    """What is wrong with a vocabulary and its hash table that others wrote, "" when nothing is.

    Looks every code up once. A slot outside the vocabulary would be read, and a table without a
    free slot, or with very long runs of used ones, searched without an end.
    """
    for array, dtype in ((vocabulary, np.uint64), (slots, np.int32)):
        if array.dtype != dtype or array.ndim != 1:
            return f"{array.dtype} {list(array.shape)}, not {np.dtype(dtype)} of one dimension"
    count = len(vocabulary)
    size = len(slots)
    if size <= count or size & (size - 1):
        return f"{size:,} slots for {count:,} codes, not a power of two above these"
    if slots.min() < EMPTY_SLOT or slots.max(initial=-1) >= count:
        return f"slots from {slots.min()} to {slots.max()}, not from -1 to {count - 1}"
    free = np.flatnonzero(slots == EMPTY_SLOT)
    longest = int(np.diff(free, append=free[:1] + size).max(initial=0))
    if not len(free):
        return f"{size:,} slots, none of them free"
    if longest > MOST_USED_SLOTS:
        return f"{longest:,} used slots in a row, not at most {MOST_USED_SLOTS:,}"
    misses = parallel.run(first_not_found, count, vocabulary, slots, grain=CODES_PER_THREAD)
    wrong = next((place for place in misses if place >= 0), None)
    return "" if wrong is None else f"code {vocabulary[wrong]}, which the slots do not find"


def _num_slots(count: int) -> int:
    return 1 << max(4, (2 * count).bit_length())
