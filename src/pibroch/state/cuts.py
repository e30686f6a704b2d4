"""Copies of the rows that changed, of all ranks at the same step."""

from __future__ import annotations

from collections.abc import Sequence

from pibroch.collectives import Channel
from pibroch.embedding import Shard


def cut_all(
    shards: Sequence[Shard], name: str, channel: Channel, with_state: bool = True
) -> list[Shard] | None:
    """Of each shard a copy of the rows marked under a name, whose marks are cleared.

    Every rank calls it. :meth:`Shard.end_cut` is to be called of each afterwards.

    Args:
        shards: of this rank.
        name: of the marks.
        channel: between the ranks.
        with_state: whether copies have optimizer state, and not weights alone.

    Returns:
        ``None`` on all ranks, and all marks as they were, where some rank has no memory for it.
    """
    cuts = [shard.cut(name, with_state) for shard in shards]
    copies = [cut for cut in cuts if cut is not None]
    if all(channel.gather(len(copies) == len(cuts))):
        return copies
    for shard, cut in zip(shards, cuts, strict=True):
        if cut is not None:
            shard.end_cut(name, is_saved=False)
    return None
