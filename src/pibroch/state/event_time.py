"""Up to which event time a version was trained: ``event_time.json``, beside its other files.

An event time is milliseconds since 1970, UTC. Readers of exports and deltas need not look at the
file; it names the manifest that it belongs to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pibroch.config.base import Section
from pibroch.errors import CheckpointError
from pibroch.state.delta_format import checksum_in
from pibroch.state.export_format import read_checked, write_checked

EVENT_TIME = "event_time.json"
_FORMAT = "pibroch-event-time"


class TrainedUntil(Section):
    """The event time until which a version was trained.

    Attributes:
        of: the checksum in the version's manifest.
        event_time: milliseconds since 1970.
    """

    format: Literal["pibroch-event-time"] = "pibroch-event-time"
    format_version: Literal[1] = 1
    of: str
    event_time: int = Field(ge=-(2**63), lt=2**63)


def write_event_time(folder: Path, event_time: int | None) -> None:
    """Write the event time of a version whose manifest is written; nothing where it has none.

    Raises:
        OSError: when the disk refuses.
    """
    if event_time is not None:
        sha256 = checksum_in(folder)
        assert sha256 is not None, "its manifest was just written"
        write_checked(folder / EVENT_TIME, TrainedUntil(of=sha256, event_time=event_time))


def event_time_of(folder: Path) -> int | None:
    """Of an export or a delta; ``None`` where it is not known."""
    if not (folder / EVENT_TIME).is_file():
        return None
    try:
        known, _ = read_checked(folder, EVENT_TIME, _FORMAT, TrainedUntil, {1: dict})
    except CheckpointError:  # whatever is wrong with it: weights are as good without
        return None
    return known.event_time if known.of == checksum_in(folder) else None


def age_of(event_time: int, now_s: float) -> float:
    """Seconds from an event time to a time of the clock.

    >>> age_of(1_500, 2.0)
    0.5
    """
    return now_s - event_time / 1000
