"""What each user did before each record of a log, in one pass over it.

R records, U users that are known, N items of a history at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

EMPTY_SLOT = -1


@kernel
def histories(
    users: NDArray[np.uint64],
    times: NDArray[np.float64],
    items: NDArray[np.uint64],
    is_kept: NDArray[np.bool_],
    num_parts: np.uint64,
    part: np.uint64,
    slots: NDArray[np.int32],
    known: NDArray[np.uint64],
    num_known: NDArray[np.int64],
    last_times: NDArray[np.float64],
    counts: NDArray[np.int64],
    earlier: NDArray[np.uint64],
    latest: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint64],
) -> int:
    """The last items of each record's user before its time, oldest first, and go on with it.

    Items of a user's latest time wait until a later one, so that none of two records of one time
    sees the other.

    Args:
        users: codes, ``[R]``; those with ``code % num_parts == part`` are followed.
        times: ``[R]``, of no user falling.
        items: codes, ``[R]``.
        is_kept: bool ``[R]``, which items later histories have.
        num_parts: of all users.
        part: of these.
        slots: int32, a power of two above U: a hash table of users' places, by open addressing.
        known: codes of users by place, ``[U]``.
        num_known: int64 ``[1]``, how many there are.
        last_times: of each, ``[U]``.
        counts: of each, items of earlier times and of its last one, ``[U, 2]``.
        earlier: of each, a ring of items of earlier times, ``[U, N]``.
        latest: the same of its last time.
        lengths: receives the histories' lengths, -1 for users of other parts, ``[R]``.
        out: receives the items, ``[R, N]``.

    Returns:
        -1; or the record for whose user there was no room any more; or -2 - i for a record i whose
        time is earlier than its user's last.
    """
    mask = np.uint64(len(slots) - 1)
    one = np.uint64(1)
    most = out.shape[1]
    for i in range(len(users)):
        lengths[i] = -1
        user = users[i]
        if user % num_parts != part:
            continue
        slot = (user // num_parts) & mask
        while slots[slot] != EMPTY_SLOT and known[slots[slot]] != user:
            slot = (slot + one) & mask
        place = slots[slot]
        if place == EMPTY_SLOT:
            if num_known[0] == len(known):
                return i
            place = np.int32(num_known[0])
            num_known[0] += 1
            slots[slot] = place
            known[place] = user
            last_times[place] = -np.inf
            counts[place, 0] = 0
            counts[place, 1] = 0
        if times[i] < last_times[place]:
            return -2 - i
        if times[i] > last_times[place]:
            count = counts[place, 1]
            for k in range(max(0, count - most), count):
                earlier[place, counts[place, 0] % most] = latest[place, k % most]
                counts[place, 0] += 1
            counts[place, 1] = 0
            last_times[place] = times[i]
        count = counts[place, 0]
        lengths[i] = min(count, most)
        for k in range(lengths[i]):
            out[i, k] = earlier[place, (count - lengths[i] + k) % most]
        if is_kept[i]:
            latest[place, counts[place, 1] % most] = items[i]
            counts[place, 1] += 1
    return -1
