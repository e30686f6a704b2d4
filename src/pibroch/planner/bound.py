"""What no placement's worst link can be below.

The problem is that of OPER, Sec. 3.3, with the worst link as its goal: K items (rows or
partitions), W shards; ``y[k, j]`` says that shard j holds item k, ``x[k, i, j]`` that i reads it
from j:

    minimise T   where  T >= sum_k weight[k] x[k, i, j] cost[i, j]   for i != j
                        sum_j x[k, i, j] = 1,   x[k, i, j] <= y[k, j],
                        sum_k memory[k] y[k, j] <= room[j]

:func:`lower_bound` is by duality: for any prices of links, with sum 1, and of memory, ``sum_k min
over sets of holders of (price of reading + price of holding) - sum_j price[j] room[j]`` is at most
T. Good prices are those of a relaxation over groups of similar items; the bound itself then looks
at every item.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize_scalar
from scipy.sparse import coo_array, csr_array

from pibroch.errors import ConfigError

Floats = NDArray[np.float64]
MAX_SHARDS = 12  # 4,095 sets of holders


@dataclass(frozen=True, slots=True)
class Case:
    """A placement problem.

    Attributes:
        weight: ``[K]``, bytes of each item that one reader gets in a step.
        memory: ``[K]``, bytes that a holder needs.
        cost: ``[W, W]`` of a byte that i reads from j.
        room: ``[W]``, bytes of each shard.
    """

    weight: Floats
    memory: Floats
    cost: Floats
    room: Floats

    def __post_init__(self) -> None:
        if len(self.room) > MAX_SHARDS:
            raise ConfigError(
                f"{len(self.room)} shards", f"at most {MAX_SHARDS} for a bound", "use fewer shards"
            )
        if self.memory.sum() > self.room.sum():
            raise ConfigError(
                f"{self.room.sum():,.0f} bytes of room",
                f"{self.memory.sum():,.0f}",
                "give the shards more room",
            )


def lower_bound(case: Case, num_groups: int = 48) -> float:
    """What no placement's worst link can be below.

    O(K 2**W), and one linear program over the groups.

    The program gives the prices of links, and of memory but for their level, which is found with
    all items.
    """
    density = case.weight / case.memory
    order = np.argsort(-density, kind="stable")
    edges = np.unique(_group_edges(case, order, num_groups))
    weight = np.add.reduceat(case.weight[order], edges)
    memory = np.add.reduceat(case.memory[order], edges)
    grouped = Case(weight, memory, case.cost, case.room)
    goal, less, equal, room = program(grouped)
    solution = linprog(
        goal, less, room, equal, np.ones(equal.shape[0]), bounds=(0, None), method="highs"
    )
    num_links = len(case.room) * (len(case.room) - 1)
    duals = -np.minimum(solution.ineqlin.marginals, 0.0)
    prices = np.zeros_like(case.cost)
    prices[~np.eye(len(case.room), dtype=bool)] = duals[:num_links]
    holding = duals[-len(case.room) :] * scale(case) / _memory_scale(case)
    prices /= max(prices.sum(), 1e-300)
    if not holding.any():
        return dual_bound(case, prices, holding)
    best = minimize_scalar(
        lambda level: -dual_bound(case, prices, level * holding),
        bounds=(0.2, 3.0),
        method="bounded",
    )
    return max(-float(best.fun), dual_bound(case, prices, holding))


def dual_bound(case: Case, link_prices: Floats, memory_prices: Floats) -> float:
    """The bound that prices give.

    It is valid for any prices that are not negative, those of links summing up to 1.
    """
    num_shards = len(case.room)
    price = link_prices * case.cost
    np.fill_diagonal(price, 0.0)
    sets = (np.arange(1, 1 << num_shards)[:, None] >> np.arange(num_shards)) & 1 == 1
    reading = np.stack(
        [np.where(sets, price[reader], np.inf).min(axis=1) for reader in range(num_shards)]
    ).sum(axis=0)
    holding = sets @ memory_prices
    best = np.full(len(case.weight), np.inf)
    for number in _undominated(reading, holding):
        np.minimum(best, case.weight * reading[number] + case.memory * holding[number], out=best)
    return float(best.sum() - memory_prices @ case.room)


def _undominated(reading: Floats, holding: Floats) -> list[int]:
    chosen = []
    least = np.inf
    for number in np.lexsort((reading, holding)):
        if reading[number] < least:
            chosen.append(int(number))
            least = reading[number]
    return chosen


def _group_edges(case: Case, order: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Where groups begin: half of them by equal weight, half by equal memory."""
    half = np.linspace(0, 1, num_groups // 2, endpoint=False)
    by_weight = np.searchsorted(
        np.cumsum(case.weight[order]) / max(case.weight.sum(), 1e-300), half
    )
    by_memory = np.searchsorted(np.cumsum(case.memory[order]) / case.memory.sum(), half)
    edges = np.concatenate([[0], by_weight, by_memory]).astype(np.int64)
    return edges[edges < len(order)]


def scale(case: Case) -> float:
    """Of links, so that the solver's tolerances mean something."""
    return float(case.weight.sum() * case.cost.max() / len(case.room)) or 1.0


def _memory_scale(case: Case) -> float:
    return float(case.room.mean())


def program(case: Case) -> tuple[Floats, csr_array, csr_array, Floats]:
    """Goal, rows of inequalities (links, paths, room) and of equalities, right side; scaled."""
    num_items = len(case.weight)
    num_shards = len(case.room)
    num_x = num_items * num_shards * num_shards
    num_y = num_items * num_shards
    items, readers, shards = np.meshgrid(
        np.arange(num_items), *[np.arange(num_shards)] * 2, indexing="ij"
    )
    x = np.arange(num_x).reshape(items.shape)
    y = num_x + np.arange(num_y).reshape(num_items, num_shards)
    is_link = readers != shards
    number_of = np.full((num_shards, num_shards), -1)
    off = ~np.eye(num_shards, dtype=bool)
    number_of[off] = np.arange(off.sum())
    num_links = int(off.sum())
    amounts = case.weight[:, None, None] * case.cost / scale(case)
    parts = [
        (
            number_of[readers, shards][is_link],
            x[is_link],
            np.broadcast_to(amounts, x.shape)[is_link],
        ),
        (np.arange(num_links), np.full(num_links, num_x + num_y), np.full(num_links, -1.0)),
        (num_links + x.ravel(), x.ravel(), np.ones(num_x)),
        (num_links + x.ravel(), y[items, shards].ravel(), np.full(num_x, -1.0)),
        (
            num_links + num_x + np.tile(np.arange(num_shards), num_items),
            y.ravel(),
            np.repeat(case.memory / _memory_scale(case), num_shards),
        ),
    ]
    rows, columns, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    shape = (num_links + num_x + num_shards, num_x + num_y + 1)
    less = csr_array(coo_array((values, (rows, columns)), shape=shape))
    one = np.arange(num_items * num_shards)
    equal = csr_array(
        coo_array(
            (np.ones(num_x), (np.repeat(one, num_shards), x.ravel())), shape=(len(one), shape[1])
        )
    )
    goal = np.zeros(shape[1])
    goal[-1] = 1.0
    return (
        goal,
        less,
        equal,
        np.concatenate([np.zeros(num_links + num_x), case.room / _memory_scale(case)]),
    )
