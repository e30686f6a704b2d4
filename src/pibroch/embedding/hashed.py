"""Tables of raw ids: an id is given one of a fixed number of rows when steps bring it.

It keeps the row until it is evicted for others or expires. What happens in a step follows from the
ids of the steps so far and how often each stood in them. In each step, in this order:

1. Ids that have a row are seen, ids without one are counted; some are admitted.
2. Ids that were not seen for too long expire.
3. When fewer rows are free than ids were admitted, others are evicted: as many as are needed and a
   sixteenth of all rows, so that the pass over all rows is seldom.
4. Admitted ids, rising, are given the lowest free rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pibroch.config.row_index import HashedConfig
from pibroch.embedding.admission import AfterCount
from pibroch.embedding.eviction import EvictionPolicy, LeastFrequent, LeastRecent
from pibroch.embedding.expiry import CHECKS_PER_EXPIRY, Expiry
from pibroch.embedding.hashed_index import HashedIndex
from pibroch.embedding.row_index import IndexKind
from pibroch.errors import ConfigError
from pibroch.integers import whole_number
from pibroch.kernels import key_table


@dataclass(frozen=True, slots=True)
class Hashed(IndexKind):
    """Ids are any int64; the table's ``num_rows`` is how many of them have rows at a time.

    Attributes:
        admit: when an id is given a row.
        evict: who loses theirs when rows are short.
        expire_after: steps without an id after which it loses its row, looked for every sixteenth
            of them; ``None`` for never.
        expire_after_seconds: the same in event time, see :mod:`pibroch.data.event_clock`.
        unknown_row: ids without a row read and train the table's first one, which they share, as
            the unknown token of a vocabulary. Otherwise they are absent from their bags.
    """

    admit: AfterCount = field(default_factory=AfterCount)
    evict: EvictionPolicy = field(default_factory=LeastRecent)
    expire_after: int | None = None
    unknown_row: bool = False
    expire_after_seconds: float | None = None

    name = "hashed"
    section = HashedConfig

    def __post_init__(self) -> None:
        for label, value, kind in (
            ("admit", self.admit, AfterCount),
            ("evict", self.evict, EvictionPolicy),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"hashed rows with {label} {value!r}", f"a {kind.__name__}")
        if self.expire_after is not None:
            number = whole_number(self.expire_after, "hashed rows with expire_after", 1)
            object.__setattr__(self, "expire_after", number)
        seconds = self.expire_after_seconds
        if seconds is not None and not CHECKS_PER_EXPIRY / 1000 <= seconds < math.inf:
            raise ConfigError(
                f"hashed rows with expire_after_seconds {seconds}",
                f"at least {CHECKS_PER_EXPIRY / 1000} seconds",
            )

    @classmethod
    def of_recipe(
        cls,
        *,
        admit_after: int,
        sketch: bool,
        evict: str,
        half_life: int | None,
        expire_after: int | None,
        unknown_row: bool,
        expire_after_seconds: float | None,
    ) -> Hashed:
        """By the settings of :class:`HashedConfig`."""
        policy = LeastFrequent(half_life) if evict == LeastFrequent.name else LeastRecent()
        admit = AfterCount(admit_after, sketch)
        return cls(admit, policy, expire_after, unknown_row, expire_after_seconds)

    @property
    def is_timed(self) -> bool:
        """Whether ids expire by event time."""
        return self.expire_after_seconds is not None

    def index(self, capacity: int) -> HashedIndex:
        """See :class:`IndexKind`."""
        if capacity > key_table.MOST_ROWS:
            raise ConfigError(
                f"a hashed table of {capacity} rows",
                f"at most {key_table.MOST_ROWS}",
                "split the feature over several tables",
            )
        if self.unknown_row and capacity == 1:
            raise ConfigError(
                "a hashed table of 1 row, which is the unknown ids'", "more rows, for known ones"
            )
        expiry = Expiry(self.expire_after, self.expire_after_seconds)
        return HashedIndex(capacity, self.admit, self.evict, expiry, self.unknown_row)

    def described(self) -> dict[str, Any]:
        """See :class:`IndexKind`."""
        return {
            "name": self.name,
            "admit": self.admit.described(),
            "evict": self.evict.described(),
            "expire_after": self.expire_after,
            # as before there were these
            **({"unknown_row": True} if self.unknown_row else {}),
            **({"expire_after_seconds": self.expire_after_seconds} if self.is_timed else {}),
        }
