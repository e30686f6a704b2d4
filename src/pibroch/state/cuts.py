"""Copies of the rows that changed, of all ranks at the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pibroch.collectives import Channel
from pibroch.embedding import Shard

Cut = TypeVar("Cut")


def cut_all(
    shards: Sequence[Shard], name: str, channel: Channel, cut: Callable[[Shard], Cut | None]
) -> list[Cut] | None:
    """Of each shard the rows marked under a name, whose marks are cleared.

    Every rank calls it. :meth:`Shard.end_cut` is to be called of each afterwards.

    Args:
        shards: of this rank.
        name: of the marks.
        channel: between the ranks.
        cut: takes them of a shard, by :meth:`Shard.cut` or :meth:`Shard.cut_in_place`.

    Returns:
        ``None`` on all ranks, and all marks as they were, where some rank has no memory for it.
    """
    cuts = [cut(shard) for shard in shards]
    done = [each for each in cuts if each is not None]
    if all(channel.gather(len(done) == len(cuts))):
        return done
    for shard, each in zip(shards, cuts, strict=True):
        if each is not None:
            shard.end_cut(name, is_saved=False)
    return None
