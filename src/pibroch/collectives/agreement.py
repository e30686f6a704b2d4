"""Work that every rank does, and that has been done by all or by none.

A failure anywhere is an error everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from pibroch import errors
from pibroch.collectives import Channel
from pibroch.errors import PibrochError, RankFailedError

T = TypeVar("T")


def together(channel: Channel, work: Callable[[], T]) -> list[T]:
    """Do ``work`` on every rank; returns the results of all, in rank order.

    Blocks until all are done.

    Args:
        channel: between the ranks.
        work: gives plain values (what JSON can hold); must not use the channel.

    Raises:
        PibrochError: on all ranks when it failed on one, of the same class everywhere.
        RankFailedError: when a rank failed with anything else, or was lost.
    """
    value = None
    problem = None
    try:
        value = work()
    except Exception as error:  # raised again below, once the others know
        problem = error
    outcomes = channel.gather(
        {"value": value, "error": None if problem is None else _plain(problem)}
    )
    if problem is not None:
        raise problem
    for rank, outcome in enumerate(outcomes):
        if outcome["error"] is not None:
            raise _rebuilt(rank, outcome["error"])
    return [outcome["value"] for outcome in outcomes]


def agreed(channel: Channel, work: Callable[[], T]) -> T:
    """As :func:`together`, for work that gives anything; returns this rank's own result."""
    done: list[T] = []
    together(channel, lambda: done.append(work()))
    return done[0]


def on_first(channel: Channel, work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 alone, and give its result, or its error, to all.

    Blocks until it is done.
    """
    return cast(T, together(channel, lambda: work() if channel.ranks.rank == 0 else None)[0])


def _plain(error: Exception) -> dict[str, str]:
    if isinstance(error, PibrochError):
        return {"kind": type(error).__name__, "got": error.got, "need": error.need, "do": error.do}
    return {"kind": "", "got": f"{type(error).__name__}: {error}"}


def _rebuilt(rank: int, error: dict[str, str]) -> PibrochError:
    kind = getattr(errors, error["kind"], None) if error["kind"] else None
    if kind is None or kind is RankFailedError:
        return RankFailedError(rank, None, error["got"])
    rebuilt: PibrochError = kind(f"{error['got']} (on rank {rank})", error["need"], error["do"])
    return rebuilt
