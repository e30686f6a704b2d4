"""What histories are, in plain Python."""

from __future__ import annotations

from collections import defaultdict

from pibroch.kernels.arrays import Array


def histories(
    users: Array, times: Array, items: Array, is_kept: Array, most: int
) -> list[list[int]]:
    """Of each record the last items of its user's kept records of earlier times."""
    of_user: dict[int, list[tuple[float, int]]] = defaultdict(list)
    found = []
    for user, time, item, kept in zip(users, times, items, is_kept, strict=True):
        before = [int(each) for earlier, each in of_user[user] if earlier < time]
        found.append(before[max(0, len(before) - most) :])
        if kept:
            of_user[user].append((time, item))
    return found
