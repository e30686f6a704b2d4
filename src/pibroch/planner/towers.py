"""Which features share a tower, learned from their embeddings (DMT, Sec. 3.3).

Similarities of features become distances, distances become coordinates, and features near each
other, or far from each other, become groups of about equal size and weight.

Shape legend: n samples, F features, N width of embeddings, T towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from pibroch.errors import ConfigError

Floats = NDArray[np.float64]
Strategy = Literal["coherent", "diverse"]
STARTS = 8
ROUNDS = 50
STRESS_STEPS = 500


@dataclass(frozen=True, slots=True)
class Balance:
    """How even groups have to be.

    Attributes:
        size_ratio: most features of a group by the fewest of one (``R``).
        bytes_ratio: most bytes of a group by the mean, unless the largest feature alone has more.
    """

    size_ratio: float = 1.5
    bytes_ratio: float = 1.1


class Centres:
    """The mean embedding of each feature over samples.

    The product of one feature's mean with another's embedding says what the latter does by itself,
    whatever the former is: no interaction, but it turns both towards each other. Without means,
    what is left of the products is interaction alone.

    Args:
        num_features: F.
        dim: N.
    """

    def __init__(self, num_features: int, dim: int) -> None:
        self._sum = torch.zeros(num_features, dim, dtype=torch.float64)
        self._count = torch.zeros(num_features, 1, dtype=torch.float64)

    def add(self, embedded: Tensor) -> None:
        """Count samples, ``[n, F, N]``, those of embeddings of zeros aside."""
        self._sum += embedded.double().sum(0)
        self._count += (embedded.norm(dim=2, keepdim=True) > 0).sum(0)

    def mean(self) -> Tensor:
        """``[F, N]``."""
        return (self._sum / self._count.clamp_min(1)).float()


class Similarity:
    """Mean similarity of features over samples: ``|cos|`` of two features' embeddings of a sample.

    Args:
        num_features: F.
        centres: ``[F, N]``, what is taken from each feature's embeddings before, see
            :class:`Centres`; nothing when absent.
    """

    def __init__(self, num_features: int, centres: Tensor | None = None) -> None:
        self._centres = centres
        self._sum = torch.zeros(num_features, num_features, dtype=torch.float64)
        self._both = torch.zeros(num_features, num_features, dtype=torch.float64)

    def add(self, embedded: Tensor) -> None:
        """Count samples, ``[n, F, N]``; embeddings of zeros, as of empty bags, say nothing."""
        norms = embedded.norm(dim=2, keepdim=True)
        if self._centres is not None:
            embedded = torch.where(norms > 0, embedded - self._centres, 0.0)
            norms = embedded.norm(dim=2, keepdim=True)
        units = (embedded / norms.clamp_min(1e-30)).transpose(0, 1)
        is_there = (norms[:, :, 0] > 0).double()
        self._both += is_there.T @ is_there
        for feature in range(len(units)):  # so that [n, F, F] is never there
            self._sum[feature] += (units * units[feature]).sum(2).abs().double().sum(1)

    def mean(self) -> Floats:
        """``[F, F]`` from 0 to 1; 1 on the diagonal."""
        similarity: Floats = (self._sum / self._both.clamp_min(1)).numpy()
        np.fill_diagonal(similarity, 1.0)
        return similarity


def coordinates(similarity: Floats, strategy: Strategy, seed: int = 0, num_dims: int = 2) -> Floats:
    """Points ``[F, num_dims]`` whose distances are those of features, as near as there is room.

    They are found by Adam on the stress, from some starts, of which the best is kept.

    Args:
        similarity: ``[F, F]``, see :class:`Similarity`.
        strategy: features that are alike are near each other (``coherent``), or far (``diverse``).
        seed: of where points begin.
        num_dims: of the plane.
    """
    wanted = torch.from_numpy(1.0 - similarity if strategy == "coherent" else similarity.copy())
    wanted.fill_diagonal_(0.0)
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(
        STARTS, len(wanted), num_dims, generator=generator, dtype=torch.float64
    ).requires_grad_()
    optimizer = torch.optim.Adam([points], lr=0.05)
    above = torch.triu_indices(len(wanted), len(wanted), 1)
    for step in range(STRESS_STEPS + 1):
        distances = (points[:, above[0]] - points[:, above[1]]).square().sum(2).add(1e-12).sqrt()
        stress = (distances - wanted[above[0], above[1]]).square().sum(1)
        if step < STRESS_STEPS:
            optimizer.zero_grad()
            stress.sum().backward()
            optimizer.step()
    return points[stress.argmin()].detach().numpy()


def balanced_groups(
    points: Floats, weights: Floats, num_towers: int, balance: Balance, seed: int = 0
) -> list[list[int]]:
    """Groups of points near each other.

    By k-means, whose assignment is the best that is balanced (by HiGHS).

    Args:
        points: ``[F, d]``.
        weights: of each feature, such as bytes or lookups, ``[F]``.
        num_towers: T.
        balance: what is asked of groups.
        seed: of where centres begin; the best of some starts is kept.

    Raises:
        ConfigError: for more towers than features.
    """
    if not 1 <= num_towers <= len(points):
        raise ConfigError(
            f"{num_towers} towers for {len(points)} features", f"from 1 to {len(points)}"
        )
    rng = np.random.default_rng(seed)
    best = np.inf
    groups = np.zeros(len(points), np.int64)
    for _ in range(STARTS):
        centres = _spread(points, num_towers, rng)
        assigned = np.full(len(points), -1)
        for _ in range(ROUNDS):
            costs = ((points[:, None] - centres) ** 2).sum(2)
            before = assigned
            assigned = _assign(costs, weights, balance)
            if np.array_equal(before, assigned):
                break
            centres = np.stack([points[assigned == tower].mean(0) for tower in range(num_towers)])
        cost = float(((points - centres[assigned]) ** 2).sum())
        if cost < best:
            best = cost
            groups = assigned
    return [np.flatnonzero(groups == tower).tolist() for tower in range(num_towers)]


def partition(
    similarity: Floats,
    weights: Sequence[float],
    num_towers: int,
    strategy: Strategy = "coherent",
    balance: Balance = Balance(),
    categories: Sequence[str] | None = None,
) -> list[list[int]]:
    """Groups of features by number.

    Inside the given categories, where there are some, as many towers as fit their sizes.

    Raises:
        ConfigError: for more towers than features, or fewer than categories.
    """
    weight = np.asarray(weights, np.float64)
    points = coordinates(similarity, strategy)
    if categories is None:
        return balanced_groups(points, weight, num_towers, balance)
    names = sorted(set(categories))
    members = [np.flatnonzero(np.array(categories) == name) for name in names]
    if num_towers < len(names):
        raise ConfigError(
            f"{num_towers} towers for {len(names)} categories",
            f"at least {len(names)}, one for each",
        )
    counts = np.ones(len(names), np.int64)
    sizes = np.array([len(each) for each in members])
    if num_towers > sizes.sum():
        raise ConfigError(
            f"{num_towers} towers for {sizes.sum()} features", f"at most {sizes.sum()}"
        )
    for _ in range(num_towers - len(names)):
        counts[np.argmax(np.where(counts < sizes, sizes / counts, -1.0))] += 1
    groups = []
    for each, count in zip(members, counts.tolist(), strict=True):
        groups += [
            each[group].tolist()
            for group in balanced_groups(points[each], weight[each], count, balance)
        ]
    return groups


def _spread(points: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Centres that begin far from each other (k-means++)."""
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < count:
        nearest = ((points[:, None] - points[chosen]) ** 2).sum(2).min(1)
        nearest[chosen] = 0.0
        total = nearest.sum()
        rest = np.setdiff1d(np.arange(len(points)), chosen)
        chosen.append(
            int(rng.choice(len(points), p=nearest / total) if total > 0 else rng.choice(rest))
        )
    return points[chosen]


def _assign(costs: Floats, weights: Floats, balance: Balance) -> NDArray[np.int64]:
    """The tower of each feature, of least cost ``[F, T]`` among those that are balanced."""
    num_features, num_towers = costs.shape
    fewest, most = _sizes(num_features, num_towers, balance.size_ratio)
    once = np.kron(np.eye(num_features), np.ones(num_towers))
    size = np.tile(np.eye(num_towers), num_features)
    weight = np.kron(weights, np.eye(num_towers))
    limit = max(balance.bytes_ratio * weights.sum() / num_towers, weights.max())
    while True:
        solution = milp(
            costs.ravel(),
            constraints=[
                LinearConstraint(once, 1, 1),
                LinearConstraint(size, fewest, most),
                LinearConstraint(weight, 0, limit),
            ],
            integrality=np.ones(costs.size),
            bounds=Bounds(0, 1),
            options={"time_limit": 10.0, "mip_rel_gap": 1e-3},
        )
        if solution.x is not None:
            out: NDArray[np.int64] = solution.x.reshape(costs.shape).argmax(1)
            return out
        limit *= 1.05  # nothing weighs so little: features cannot be cut


def _sizes(num_features: int, num_towers: int, ratio: float) -> tuple[int, int]:
    """The fewest and the most features of a tower; most are at most ``ratio`` times fewest."""
    fewest = num_features // num_towers
    most = -(-num_features // num_towers)
    while fewest > 1 and ratio * (fewest - 1) >= most:
        fewest -= 1
    return fewest, max(most, int(ratio * fewest))
