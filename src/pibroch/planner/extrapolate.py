"""A profile of more samples and a larger vocabulary, such that thinning it gives the sample back.

A sample keeps each access with probability q, so a row of K accesses is seen Poisson(q K) times.
Rows seen often keep their rank: K = s / q. For the others the rates ``q K`` are a mixture that must
explain how many rows were seen 0, 1, 2, ... times; since the size of the vocabulary is given, the
unseen ones are counted too, and the mixture is found by expectation maximisation over a grid of
rates (the non-parametric maximum likelihood of Kiefer and Wolfowitz). Stretching the sample's own
curve instead would multiply what was seen once, most of it by luck, and miss the tail.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError
from pibroch.planner.profile import AccessProfile, TableCounts

SEEN_OFTEN = 40  # times; from there on a rate is known well enough
GRID_POINTS = 160
ITERATIONS = 3000

Floats = NDArray[np.float64]


def extrapolate(
    profile: AccessProfile,
    num_samples: int,
    num_rows: Mapping[str, int] | None = None,
    seed: int = 0,
) -> AccessProfile:
    """The profile that ``num_samples`` samples would have; O(rows).

    Args:
        profile: of a uniform sample.
        num_samples: at least as many as the profile has.
        num_rows: of the tables then, by name; those not named keep theirs.
        seed: decides which row has which count, and of rounding.

    Raises:
        ConfigError: for fewer samples, or tables with fewer rows than were seen, or unknown ones.
    """
    if num_samples < profile.num_samples:
        raise ConfigError(
            f"{num_samples:,} samples",
            f"at least the profile's {profile.num_samples:,}",
            "choose a larger number",
        )
    wanted = dict(num_rows or {})
    unknown = [name for name in wanted if name not in profile.tables]
    if unknown:
        raise ConfigError(f"rows for table {unknown[0]!r}", f"one of {', '.join(profile.tables)}")
    rng = np.random.default_rng(seed)
    tables = {}
    num_batches = -(-num_samples // profile.batch_size)
    for name, counts in profile.tables.items():
        rows = wanted.get(name, len(counts.accesses))
        seen = counts.accesses[counts.accesses > 0]
        if rows < len(seen):
            raise ConfigError(
                f"{rows:,} rows for table {name!r}", f"at least the {len(seen):,} that were seen"
            )
        accesses = rng.permutation(_counts(seen, rows, profile.num_samples / num_samples, rng))
        tables[name] = TableCounts(
            accesses, _batches(accesses, num_samples, num_batches, profile.batch_size, rng)
        )
    origin = dict(profile.origin) | {"extrapolated_from_samples": profile.num_samples, "seed": seed}
    return AccessProfile(
        tables, num_samples, num_batches, profile.batch_size, profile.fingerprint, origin
    )


def _counts(
    seen: NDArray[np.int64], num_rows: int, share: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Counts of all rows: those seen often by their rank, the others from the mixture."""
    if share >= 1:
        return np.concatenate([seen, np.zeros(num_rows - len(seen), np.int64)])
    often = seen[seen > SEEN_OFTEN]
    num_left = num_rows - len(often)
    histogram = np.bincount(seen[seen <= SEEN_OFTEN], minlength=SEEN_OFTEN + 1).astype(np.float64)
    histogram[0] = num_left - histogram.sum()
    if num_left == 0:
        return np.asarray(np.rint(often / share), np.int64)
    rates = np.concatenate([[0.0], np.geomspace(min(share, 0.5), SEEN_OFTEN * 1.3, GRID_POINTS)])
    amounts = _mixture(histogram, rates)
    ends = np.rint(np.cumsum(amounts) * (num_left / amounts.sum())).astype(np.int64)
    exact = np.repeat(rates, np.diff(ends, prepend=0)) / share
    low = np.floor(exact)
    rounded = low + (rng.random(len(exact)) < exact - low)
    return np.concatenate([np.rint(often / share), rounded]).astype(np.int64)


def _mixture(histogram: Floats, rates: Floats) -> Floats:
    """Rows of each rate ``[G]`` that explain how many rows were seen how often ``[S]``.

    Of these rows alone.
    """
    times = np.arange(len(histogram))
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, len(histogram))))])
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = np.exp(times * np.log(rates)[:, None] - rates[:, None] - logs)  # [G, S]
    chance[rates == 0] = times == 0
    within = chance.sum(axis=1)  # of high rates a part lies beyond the histogram
    amounts = np.full(len(rates), histogram.sum() / len(rates))
    for _ in range(ITERATIONS):
        explained = np.maximum(amounts @ chance, 1e-300)
        amounts = amounts * (chance @ (histogram / explained)) / within
    return np.asarray(amounts * within)


def _batches(
    accesses: NDArray[np.int64],
    num_samples: int,
    num_batches: int,
    batch_size: int,
    rng: np.random.Generator,
) -> NDArray[np.int32]:
    """Batches in which rows occur, when accesses are spread by chance.

    They are rounded so that sums stay right.
    """
    share = np.minimum(accesses / num_samples, 1.0)
    with np.errstate(divide="ignore"):
        expected = np.minimum(-num_batches * np.expm1(batch_size * np.log1p(-share)), accesses)
    low = np.floor(expected)
    rounded = low + (rng.random(len(expected)) < expected - low)
    return np.asarray(np.where(accesses > 0, np.maximum(rounded, 1), 0), np.int32)
