"""What placing samples means, in sets and dictionaries.

The model of what a row costs: its record is with one rank. Of the ranks that read it in a step one
owns it: who has it already, or another, to which it moves (``fetch``). Each of the others borrows
its weights and sends a gradient back (``share``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NOBODY = -1
ORDERS = 256


@dataclass(frozen=True)
class Row:
    """A row of a batch.

    Attributes:
        where: the rank that has its record, or ``NOBODY``.
        fetch, share: see the module.
    """

    where: int
    fetch: int
    share: int


@dataclass
class NaiveStates:
    """Where rows are, from step to step.

    Attributes:
        horizon: a row that no step read for longer is at home; 0 where rows never leave.
        homes: of all rows.
        now: number of the step.
    """

    horizon: int
    homes: Sequence[int]
    now: int = 0
    read_at: dict[int, int] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)

    def row(self, row: int, weight: int = 1) -> Row:
        """As it is before the step."""
        is_away = row in self.read_at and self.now - self.read_at[row] <= self.horizon
        where = self.owner[row] if is_away else self.homes[row]
        return Row(where, weight if self.horizon else 2 * weight, 2 * weight)

    def settle(self, samples: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        """A step was trained so."""
        before = {row: self.row(row).where for rows in samples for row in rows}
        for row, readers in readers_of(samples, ranks).items():
            among = sorted(readers)
            fits = [rank for rank in (before[row], self.homes[row]) if rank in readers]
            self.owner[row] = fits[0] if fits else among[row % len(among)]
            self.read_at[row] = self.now


def readers_of(samples: Sequence[Sequence[int]], ranks: Sequence[int]) -> dict[int, Counter[int]]:
    """Of each row how many samples of each rank read it."""
    readers: dict[int, Counter[int]] = {}
    for rows, rank in zip(samples, ranks, strict=True):
        for row in set(rows):
            readers.setdefault(row, Counter())[rank] += 1
    return readers


def count_transfers(
    samples: Sequence[Sequence[int]],
    ranks: Sequence[int],
    rows: Mapping[int, Row],
    price: Sequence[Sequence[int]],
) -> int:
    """What a step costs."""
    total = 0
    for number, readers in readers_of(samples, ranks).items():
        row = rows[number]
        owner = row.where if row.where in readers else min(readers)
        total += row.fetch * price[row.where][owner] if row.where != NOBODY else 0
        total += sum(row.share * price[owner][reader] for reader in readers)
    return total


def costs_of(
    own: Sequence[int],
    rows: Mapping[int, Row],
    readers: Mapping[int, Counter[int]],
    price: Sequence[Sequence[int]],
    sharing: int,
) -> list[int]:
    """What a sample that reads ``own`` costs more on each rank, beside those that ``readers`` has.

    A rank that reads a row already reads it once more for nothing. Where nobody does, the row moves
    there. Else the rank borrows it of the owner; if the rank has the record, that need not move.
    """
    costs = [0] * len(price)
    for number in own:
        row = rows[number]
        present = {rank for rank, count in readers.get(number, {}).items() if count}
        owner = row.where if row.where in present else min(present, default=NOBODY)
        for rank in range(len(price)):
            if rank in present:
                continue
            if owner != NOBODY:
                costs[rank] += sharing * row.share * price[owner][rank]
                costs[rank] -= row.fetch * price[rank][owner] if rank == row.where else 0
            elif row.where != NOBODY:
                costs[rank] += row.fetch * price[row.where][rank]
    return costs


def regret_of(costs: Sequence[int]) -> int:
    """How much more the second best rank costs than the best."""
    best, second = sorted(costs)[:2]
    return second - best


def in_order(regrets: Sequence[int]) -> list[int]:
    """Samples by falling regret, of which ``ORDERS`` are told apart at most.

    >>> in_order([3, 7, 7, 0])
    [1, 2, 0, 3]
    """
    most = max([0, *regrets])
    shift = max(0, most.bit_length() - (ORDERS - 1).bit_length())
    return sorted(range(len(regrets)), key=lambda sample: (most - regrets[sample]) >> shift)


def place(
    samples: Sequence[Sequence[int]],
    rows: Mapping[int, Row],
    sizes: Sequence[int],
    price: Sequence[Sequence[int]],
    passes: int,
    most_reads: int,
    sharing: int,
) -> list[int]:
    """A rank for each sample, ``sizes[r]`` of them on rank r.

    1. Rows that more than ``most_reads`` ids are of are left aside.
    2. Samples come in the order of their regret: who loses most by the second best rank chooses
       first. At first only where rows are counts.
    3. Each takes the cheapest rank that has room, beside the samples that stand there.
    4. ``passes`` times over: all come in the order of their last regret, each is taken out and
       placed anew beside all others.
    """
    reads = Counter(row for own in samples for row in own)
    kept = [[row for row in dict.fromkeys(own) if reads[row] <= most_reads] for own in samples]
    ranks = [NOBODY] * len(samples)
    regrets = [regret_of(costs_of(own, rows, {}, price, sharing)) for own in kept]
    readers: dict[int, Counter[int]] = {row: Counter() for own in kept for row in own}
    for _ in range(1 + passes):
        left = list(sizes)
        for sample in in_order(regrets):
            own = kept[sample]
            for row in own:
                if ranks[sample] != NOBODY:
                    readers[row][ranks[sample]] -= 1
            costs = costs_of(own, rows, readers, price, sharing)
            regrets[sample] = regret_of(costs)
            best = min((rank for rank, room in enumerate(left) if room), key=costs.__getitem__)
            left[best] -= 1
            ranks[sample] = best
            for row in own:
                readers[row][best] += 1
    return ranks
