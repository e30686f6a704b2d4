"""What ranks must have in common: options, how many batches they take, errors about a bad one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError, DataError, RowIdError


def check_same_options(channel: Channel, options: Mapping[str, object]) -> None:
    """Refuse ranks with different options, by name; every rank calls it.

    Raises:
        ConfigError: on every rank, unless all have the same.
    """
    for rank, others in enumerate(channel.gather(options)):
        if others != options:
            name = next(name for name in options if others[name] != options[name])
            raise ConfigError(
                f"{name} {options[name]!r} on rank {channel.ranks.rank}, {others[name]!r} on rank"
                f" {rank}",
                "the same options on all ranks",
            )


def bad_batch(channel: Channel, problem: RowIdError | None) -> DataError | None:
    """The error for a batch that is bad on some rank: this rank's own, or one that names the rank.

    Every rank calls it.
    """
    problems: list[str | None] = channel.gather(None if problem is None else str(problem))
    if problem is not None:
        return problem
    rank, text = next(
        ((rank, text) for rank, text in enumerate(problems) if text is not None), (None, None)
    )
    need = "ids inside their tables on every rank"
    return None if rank is None else DataError(f"a bad batch on rank {rank}: {text}", need)


def and_then_fillers(
    batches: Iterable[JaggedBatch], keys: tuple[str, ...]
) -> Iterator[tuple[JaggedBatch, bool]]:
    """The batches, each paired with True, then fillers without end, each paired with False."""
    width = 0
    for batch in batches:
        width = batch.dense.shape[1]
        yield batch, True
    nothing = torch.empty(0)
    offsets = torch.zeros(1, dtype=torch.int64)
    while True:
        yield JaggedBatch(torch.empty(0, width), keys, nothing.long(), offsets, nothing), False
