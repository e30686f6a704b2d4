"""Sequences of what users did before each record of a log, built from the log itself.

One pass over the spool in its order, which is that of time: of each user the last items are held. A
history has items of earlier times alone, so that no record sees itself, what happened at the same
time, or its future. Where there are more users than memory has room for, they are divided by their
codes, and each part takes a pass of its own.

R records of a piece, V items of their histories, N items of a history at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pibroch.data.kernels.histories import EMPTY_SLOT, histories
from pibroch.data.kernels.text import EMPTY_CODE
from pibroch.data.parse import LoggedEvents
from pibroch.data.schema import CategoricalFeature
from pibroch.data.spool import Spool
from pibroch.data.transform import MISSING_ROW
from pibroch.errors import DataError

Histories = tuple[NDArray[np.int64], NDArray[np.uint64]]
"""Lengths ``[R]``, -1 for users of other parts, and codes of items ``[V]``."""
_RECORDS = 1 << 14
"""That are followed at once; of each there is room for N items."""
_USER_BYTES = 64
"""Besides its items, of which there is room for 2 N."""


def build_histories(
    spool: Spool,
    feature_id: int,
    memory_bytes: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Build the sequences of a feature for all pieces of a spool, unless they are there.

    Args:
        spool: all pieces.
        feature_id: place of the feature in the schema.
        memory_bytes: of users held at once.
        progress: called with the fraction of the pass that is done.

    Raises:
        DataError: for a record that is earlier than the one before it of the same user.
        StorageError: when the disk refuses.
    """
    feature = spool.schema.categorical[feature_id]
    assert feature.max_length is not None, "the schema was checked"
    most_users = max(1, memory_bytes // (16 * feature.max_length + _USER_BYTES))
    num_parts = 1
    while not spool.has_histories(feature_id):
        if _build(spool, feature_id, num_parts, most_users, progress):
            spool.join_histories(feature_id, num_parts)
        num_parts *= 2


def _build(
    spool: Spool,
    feature_id: int,
    num_parts: int,
    most_users: int,
    progress: Callable[[float], None],
) -> bool:
    """Build them in so many passes; false where a part has too many users."""
    feature = spool.schema.categorical[feature_id]
    for part in range(num_parts):
        users = _Users(feature, most_users, num_parts, part)
        for number in range(len(spool.pieces)):
            of_piece = users.follow(spool.events_of(number, feature_id))
            if of_piece is None:
                return False
            spool.write_histories(number, feature_id, part, *of_piece)
            progress((part + (number + 1) / len(spool.pieces)) / num_parts)
    return True


class _Users:
    """The last items of the users of one part."""

    def __init__(
        self, feature: CategoricalFeature, most_users: int, num_parts: int, part: int
    ) -> None:
        assert feature.max_length is not None, "the schema was checked"
        self._feature = feature
        is_number = feature.encoding == "integer"
        self._missing = np.uint64(MISSING_ROW) if is_number else EMPTY_CODE
        self._part = np.uint64(num_parts), np.uint64(part)
        slots = np.full(1 << (2 * most_users).bit_length(), EMPTY_SLOT, np.int32)
        rings = [np.empty((most_users, feature.max_length), np.uint64) for _ in range(2)]
        # memory is taken as users come
        self._state = (
            slots,
            np.empty(most_users, np.uint64),
            np.zeros(1, np.int64),
            np.empty(most_users),
            np.empty((most_users, 2), np.int64),
            *rings,
        )
        self._num_records = 0

    def follow(self, events: LoggedEvents) -> Histories | None:
        """The histories of a piece; ``None`` where it has more users than there is room for.

        Raises:
            DataError: for a record that is earlier than the one before it of the same user.
        """
        count = len(events.users)
        times = events.times
        if times is None:
            times = np.arange(self._num_records, self._num_records + count, dtype=np.float64)
        has_user = events.users != EMPTY_CODE
        times = np.where(has_user, times, 0.0)  # nobody's records may be in any order
        is_kept = has_user & (events.items != self._missing)
        if self._feature.events is not None and self._feature.events.clicks:
            is_kept &= events.labels > 0
        parts = list(self._blocks(events, times, is_kept))
        self._num_records += count
        if None in parts:
            return None
        lengths, items = zip(*(part for part in parts if part is not None), strict=True)
        return np.concatenate(lengths), np.concatenate(items)

    def _blocks(
        self, events: LoggedEvents, times: NDArray[np.float64], is_kept: NDArray[np.bool_]
    ) -> Iterator[Histories | None]:
        most = self._feature.max_length or 0
        for first in range(0, max(1, len(times)), _RECORDS):
            block = slice(first, first + _RECORDS)
            lengths = np.empty(len(times[block]), np.int64)
            out = np.empty((len(lengths), most), np.uint64)
            columns = events.users[block], times[block], events.items[block], is_kept[block]
            stopped = histories(*columns, *self._part, *self._state, lengths, out)
            if stopped < -1:
                self._refuse(self._num_records + first - 2 - stopped)
            if stopped >= 0:
                yield None
                return
            yield lengths, out[np.arange(most) < lengths[:, None]]

    def _refuse(self, record: int) -> None:
        events = self._feature.events
        assert events is not None, "whose records these are"
        raise DataError(
            f"record {record + 1:,} of an earlier `{events.time}` than the one before it of the"
            f" same `{events.user}`",
            f"records in the order of `{events.time}`, for the histories of `{self._feature.name}`",
            "sort the log by time, and give its files in that order",
        )
