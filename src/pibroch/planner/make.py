"""From a profile and a topology to a plan: homes and copies of all rows, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import pibroch.planner.cost as costs
from pibroch.errors import ConfigError
from pibroch.planner.assignment import Assignment
from pibroch.planner.balance import by_worth
from pibroch.planner.partition import (
    MAX_PARTITIONS,
    Form,
    Partitioner,
    Partitions,
    TableSize,
    total_bytes,
)
from pibroch.planner.prediction import BudgetStep, PlanPrediction, PolicyForecast
from pibroch.planner.profile import AccessProfile
from pibroch.planner.replicate import POLICIES, Mode, PlacedPartitions, Policy, synchronisation
from pibroch.planner.search import PlacementResult, find_placement
from pibroch.planner.topology import ClusterTopology

Floats = NDArray[np.float64]
THRESHOLDS = (1e-3, 3e-4, 1e-4, 3e-5)
PART_OF_SHARD = 0.03  # of its accesses and memory: more is not tried in one partition
ROW_BY_ROW = 256  # tables of so few rows in all are placed row by row
CURVE_POINTS = 200
UNREAD_SHARE = 0.5  # of the rows; above it a plan says so
STEPS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is to be good for.

    Attributes:
        extra: memory for copies, as a share of the tables' bytes.
        mode: inference, or training, where copies must be kept equal.
        policy: which copies are made; the mode's first one when absent.
        objective: the form of Eq. 3 whose worst link is lowered: ``transfers``, what travels here,
            or ``accesses``.
        batch_size: samples of a rank's batch; that of the profile when absent.
        threshold: on accesses and memory of a partition, as a share of all; the coarsest that meets
            the degrees of balance below when absent (Sec. 4.2, backtracking).
        memory_balance, workload_balance, link_balance: least over most, that end the backtracking.
        link_gap: worst link over its lower bound, that ends it, where the bound can be worked out.
        steps: also work out what other budgets would buy, and what other policies would give.
    """

    extra: float = 0.05
    mode: Mode = "inference"
    policy: Policy | None = None
    objective: Form = "transfers"
    batch_size: int | None = None
    threshold: float | None = None
    memory_balance: float = 0.995
    workload_balance: float = 0.995
    link_balance: float = 0.991
    link_gap: float = 1.006
    steps: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.extra < 1000:
            raise ConfigError(
                f"{self.extra:.0%} of extra memory", "at least 0 %", "correct --extra"
            )
        if self.mode not in POLICIES or self.chosen_policy not in POLICIES[self.mode]:
            choices = "; ".join(f"{mode}: {', '.join(names)}" for mode, names in POLICIES.items())
            raise ConfigError(
                f"policy {self.policy!r} for {self.mode}", choices, "choose another policy"
            )
        if self.objective not in ("accesses", "transfers"):
            raise ConfigError(f"objective {self.objective!r}", "accesses or transfers")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold {self.threshold}", "a share from 0 (row by row) to 1")

    @property
    def chosen_policy(self) -> Policy:
        """The policy, or the mode's default."""
        return self.policy or POLICIES[self.mode][0]


@dataclass(frozen=True, slots=True)
class _Trial:
    partitions: Partitions
    threshold: float
    result: PlacementResult


def make_plan(
    tables: Sequence[TableSize],
    profile: AccessProfile,
    topology: ClusterTopology,
    options: PlanOptions | None = None,
    fingerprint: str | None = None,
    num_shards: int | None = None,
    progress: Progress | None = None,
) -> tuple[Assignment, PlanPrediction]:
    """Place all rows.

    Args:
        tables: all that are to be placed.
        profile: their accesses.
        topology: a rank for each shard.
        options: budget, mode, policy, form.
        fingerprint: of the data that the plan is for (``EncodedDataset.digest``), to be compared
            with the profile's.
        num_shards: that the plan is for, to be compared with the topology.
        progress: called with the stage and the fraction that is done.

    Returns:
        The assignment and its prediction. Deterministic: equal arguments give equal plans.

    Raises:
        DataError: for a profile of other tables or data.
        ConfigError: for a topology of another size, or too little memory; both before anything is
            allocated.
    """
    options = options or PlanOptions()
    progress = progress or (lambda stage, fraction: None)
    topology.check(topology.num_ranks if num_shards is None else num_shards)
    profile.check(tables, fingerprint)
    room = rooms(tables, topology, options.extra)
    progress("counting rows", 0.0)
    partitioner = Partitioner(tables, profile, options.batch_size)
    progress("counting rows", 1.0)
    trial = _backtrack(partitioner, topology, room, options, progress)
    partitions = trial.partitions
    result = trial.result
    if result.misfits and np.isfinite(topology.memory_bytes).any():
        check_fit(partitions, result.placed, topology)
    steps = _steps(partitions, topology, tables, options, progress) if options.steps else []
    progress("assigning rows", 0.0)
    assignment = _assignment(partitioner, partitions, result.placed, topology)
    progress("assigning rows", 1.0)
    prediction = predict(partitions, result.placed, topology, options, profile, room)
    bound = _bound(partitions, topology, room, options)
    policies = _policies(partitions, topology, room, options) if options.steps else []
    changes = {
        "threshold": trial.threshold,
        "steps": steps,
        "policies": policies,
        "worst_link_bound": bound,
    }
    return assignment, prediction.model_copy(update=changes)


def rooms(tables: Sequence[TableSize], topology: ClusterTopology, extra: float) -> Floats:
    """Bytes that each shard may hold, ``[W]``.

    These are its part of the tables and of the budget, at most its memory.

    Raises:
        ConfigError: when the tables do not fit.
    """
    total = total_bytes(tables)
    memory = topology.memory_bytes
    if total > memory.sum():
        raise ConfigError(
            f"{memory.sum():,.0f} bytes of memory on {topology.num_ranks} ranks for tables of"
            f" {total:,} bytes",
            f"{total / topology.num_ranks:,.0f} bytes a rank",
            "use more ranks, smaller tables, or an optimizer with less state",
        )
    is_known = np.isfinite(memory).all()
    share = (
        memory / memory.sum() if is_known else np.full(topology.num_ranks, 1 / topology.num_ranks)
    )
    return np.minimum(total * (1 + extra) * share, memory)


def check_fit(partitions: Partitions, placed: PlacedPartitions, topology: ClusterTopology) -> None:
    """Raise a ``ConfigError`` for a placement that exceeds a rank's memory."""
    used = costs.memory(partitions.memory_bytes, placed.held)
    over = np.flatnonzero(used > topology.memory_bytes)
    if len(over):
        rank = int(over[0])
        raise ConfigError(
            f"no placement in which rank {rank} has less than {used[rank]:,.0f} bytes",
            f"at most {topology.memory_bytes[rank]:,.0f}, its memory",
            "give the ranks a little more memory than the tables need, or choose a smaller"
            " --threshold",
        )


def predict(
    partitions: Partitions,
    placed: PlacedPartitions,
    topology: ClusterTopology,
    options: PlanOptions,
    profile: AccessProfile,
    room: Floats,
) -> PlanPrediction:
    """What a placement of partitions costs a step."""
    num_shards = topology.num_ranks
    memory = partitions.memory_bytes
    forms: tuple[Form, Form] = ("accesses", "transfers")
    reads = {
        form: costs.traffic(partitions.weight(form), placed.source, num_shards) for form in forms
    }
    lookups = costs.served(partitions.accesses, placed.source, num_shards)
    used = costs.memory(memory, placed.held)
    work = costs.workload(partitions.weight("accesses"), placed.source, topology.cost)
    link_cost = reads[options.objective] * topology.cost
    copies = placed.held.sum(axis=1) - 1
    is_training = options.mode == "training"
    sync = (
        synchronisation(partitions, placed, num_shards)
        if is_training
        else np.zeros((num_shards,) * 2)
    )
    total = float(memory.sum())
    num_rows = int(partitions.num_rows.sum())
    return PlanPrediction(
        mode=options.mode,
        policy=options.chosen_policy,
        objective=options.objective,
        fingerprint=profile.fingerprint,
        batch_size=options.batch_size or profile.batch_size,
        threshold=options.threshold or 0.0,
        num_partitions=len(partitions),
        num_rows=num_rows,
        table_bytes=int(total),
        extra=options.extra,
        used_extra=float(used.sum()) / total - 1,
        memory_bytes=used.tolist(),
        room_bytes=room.tolist(),
        lookups=lookups.tolist(),
        lookup_bytes=costs.served(
            partitions.weight("accesses"), placed.source, num_shards
        ).tolist(),
        read_bytes={form: matrix.tolist() for form, matrix in reads.items()},
        link_cost=link_cost.tolist(),
        sync_bytes=sync.tolist(),
        crossing={form: crossing(matrix) for form, matrix in reads.items()},
        least_crossing=least_crossing(partitions, float(max(used.sum() - total, 0.0)), num_shards),
        copied_rows=int(partitions.num_rows[copies > 0].sum()),
        copies=int((partitions.num_rows * copies).sum()),
        balance={
            "memory": costs.degree_of_balance(used),
            "workload": costs.degree_of_balance(work),
            "communication": costs.degree_of_balance(costs.links(link_cost))
            if num_shards > 1
            else 1.0,
        },
        curve=_curve(partitions),
        hot_share=float(partitions.num_rows[copies > 0].sum()) / num_rows,
        hosts=list(topology.host_of_rank),
        warnings=_warnings(partitions, reads["transfers"], sync, options),
    )


def _warnings(
    partitions: Partitions, reads: Floats, sync: Floats, options: PlanOptions
) -> list[str]:
    """What a reader should know before using a plan."""
    notes = []
    unread = float(partitions.num_rows[partitions.accesses == 0].sum()) / max(
        1, partitions.num_rows.sum()
    )
    if unread > UNREAD_SHARE:
        notes.append(
            f"{unread:.0%} of the rows are never read in the profile: if it is of a sample,"
            " extrapolate it first (pibroch profile --to-samples)"
        )
    if options.mode == "training" and len(reads) > 1:
        weight = partitions.weight("transfers").sum()
        without = 2 * weight * (len(reads) - 1)
        more = (costs.links(reads).sum() + costs.links(sync).sum()) / max(without, 1e-300) - 1
        if more > 1e-9:
            notes.append(
                f"a step sends {more:.1%} more bytes than without copies: policy safe adds none"
            )
    return notes


def crossing(reads: Floats) -> float:
    """Share of what is read that comes from another shard."""
    total = float(reads.sum())
    return float(total - np.trace(reads)) / total if total > 0 else 0.0


def least_crossing(partitions: Partitions, extra_bytes: float, num_shards: int) -> float:
    """Share of accesses (in bytes) that cross at least.

    Each copy brings one reader's, the most worthy ones first.
    """
    weight = partitions.weight("accesses")
    memory = partitions.memory_bytes
    order = by_worth(weight, memory)
    taken = np.concatenate([[0.0], np.cumsum(memory[order])]) * (num_shards - 1)
    covered = np.concatenate([[0.0], np.cumsum(weight[order])]) / max(1e-300, weight.sum())
    return float((1 - np.interp(extra_bytes, taken, covered)) * (num_shards - 1) / num_shards)


def _backtrack(
    partitioner: Partitioner,
    topology: ClusterTopology,
    room: Floats,
    options: PlanOptions,
    progress: Progress,
) -> _Trial:
    """Cut finer until the plan is good enough or nothing finer can be numbered.

    Returns the best that was found.
    """
    thresholds = _thresholds(partitioner, topology.num_ranks, options)
    best: tuple[tuple[int, bool, float], _Trial] | None = None
    for number, threshold in enumerate(thresholds):
        progress("placing", number / len(thresholds))
        partitions = partitioner.cut(threshold)
        if partitions is None:
            break
        trial = _Trial(partitions, threshold, _place(partitions, topology, room, options))
        is_balanced = _is_balanced(partitions, trial.result, topology, options)
        rank = trial.result.misfits, not is_balanced, trial.result.worst_link
        if best is None or rank < best[0]:
            best = rank, trial
        bound = _bound(partitions, topology, room, options) if is_balanced else None
        if is_balanced and (bound is None or trial.result.worst_link <= options.link_gap * bound):
            break
    if best is None:
        raise ConfigError(
            f"threshold {options.threshold} for {partitioner.num_rows:,} rows",
            f"one that gives at most {MAX_PARTITIONS:,} partitions",
            "choose a larger one, or leave it out",
        )
    partitioner.cut(best[1].threshold)  # what it assigns are the partitions cut last
    progress("placing", 1.0)
    return best[1]


def _thresholds(partitioner: Partitioner, num_shards: int, options: PlanOptions) -> Sequence[float]:
    """Those to try, the coarsest first.

    Of a partition that is a large part of a shard nothing level can be made.
    """
    if options.threshold is not None:
        return (options.threshold,)
    if partitioner.num_rows <= ROW_BY_ROW:
        return (0.0,)
    possible = [each for each in THRESHOLDS if partitioner.cut(each) is not None]
    return [each for each in possible if each * num_shards <= PART_OF_SHARD] or possible[-1:]


def _place(
    partitions: Partitions,
    topology: ClusterTopology,
    room: Floats,
    options: PlanOptions,
    is_final: bool = True,
) -> PlacementResult:
    policy = options.chosen_policy if options.extra > 0 else "none"
    # a partition is no drop of water: copies may take one where the budget is less, and homes lie
    # one above what is level
    largest = partitions.memory_bytes.max(initial=0.0)
    least = room / room.sum() * partitions.memory_bytes.sum() + largest
    of_copies = np.minimum(np.maximum(room, least), topology.memory_bytes)
    of_homes = np.minimum(of_copies + largest, topology.memory_bytes)
    return find_placement(
        partitions, options.objective, topology, of_copies, policy, is_final, of_homes
    )


def _is_balanced(
    partitions: Partitions, result: PlacementResult, topology: ClusterTopology, options: PlanOptions
) -> bool:
    placed = result.placed
    num_shards = topology.num_ranks
    used = costs.memory(partitions.memory_bytes, placed.held)
    share = np.where(np.isfinite(topology.memory_bytes), topology.memory_bytes, 1.0)
    work = costs.workload(partitions.weight("accesses"), placed.source, topology.cost)
    between = costs.links(
        costs.communication(partitions.weight(options.objective), placed.source, topology.cost)
    )
    return (
        not result.misfits
        and costs.degree_of_balance(used / share) >= options.memory_balance
        and costs.degree_of_balance(work) >= options.workload_balance
        and (num_shards == 1 or costs.degree_of_balance(between) >= options.link_balance)
    )


def _assignment(
    partitioner: Partitioner,
    partitions: Partitions,
    placed: PlacedPartitions,
    topology: ClusterTopology,
) -> Assignment:
    copies = placed.copies
    by_rule = costs.sources(placed.home, copies, topology.cost)
    source = None if np.array_equal(by_rule, placed.source) else placed.source.astype(np.uint16)
    return Assignment(partitioner.assign(), placed.home.astype(np.uint16), copies, source)


def _steps(
    partitions: Partitions,
    topology: ClusterTopology,
    tables: Sequence[TableSize],
    options: PlanOptions,
    progress: Progress,
) -> list[BudgetStep]:
    """What other budgets would buy, with the same partitions."""
    steps = []
    for number, extra in enumerate(STEPS):
        progress("other budgets", number / len(STEPS))
        other = replace(options, extra=extra)
        result = _place(partitions, topology, rooms(tables, topology, extra), other, is_final=False)
        weight = partitions.weight(options.objective)
        between = costs.links(costs.communication(weight, result.placed.source, topology.cost))
        share = crossing(
            costs.traffic(partitions.weight("accesses"), result.placed.source, topology.num_ranks)
        )
        mean, worst = (float(between.mean()), float(between.max())) if len(between) else (0.0, 0.0)
        steps.append(BudgetStep(extra=extra, mean_link=mean, worst_link=worst, crossing=share))
    progress("other budgets", 1.0)
    return steps


def _policies(
    partitions: Partitions, topology: ClusterTopology, room: Floats, options: PlanOptions
) -> list[PolicyForecast]:
    """What each policy of the mode would give, with the same partitions."""
    out = []
    for policy in POLICIES[options.mode]:
        other = replace(options, policy=policy)
        placed = _place(partitions, topology, room, other, is_final=False).placed
        between = costs.communication(
            partitions.weight(options.objective), placed.source, topology.cost
        )
        links = costs.links(between) if topology.num_ranks > 1 else np.zeros(1)
        reads = costs.traffic(partitions.weight("transfers"), placed.source, topology.num_ranks)
        sync = (
            synchronisation(partitions, placed, topology.num_ranks)
            if options.mode == "training"
            else np.zeros(1)
        )
        out.append(
            PolicyForecast(
                policy=policy,
                copied_rows=int(partitions.num_rows[placed.held.sum(axis=1) > 1].sum()),
                mean_link=float(links.mean()),
                worst_link=float(links.max()),
                read_bytes=float(reads.sum() - np.trace(reads)),
                sync_bytes=float(sync.sum()),
            )
        )
    return out


def _bound(
    partitions: Partitions, topology: ClusterTopology, room: Floats, options: PlanOptions
) -> float | None:
    from pibroch.planner.bound import MAX_SHARDS, Case, lower_bound

    weight = partitions.weight(options.objective)
    if (
        options.chosen_policy != "links"
        or not 2 <= topology.num_ranks <= MAX_SHARDS
        or not weight.sum()
    ):
        return None
    room = np.maximum(room, partitions.memory_bytes.sum() * room / room.sum())
    return lower_bound(Case(weight, partitions.memory_bytes, topology.cost, room))


def _curve(partitions: Partitions) -> list[tuple[float, float]]:
    order = by_worth(partitions.accesses, partitions.num_rows.astype(np.float64))
    rows = np.concatenate([[0], np.cumsum(partitions.num_rows[order])]) / max(
        1, partitions.num_rows.sum()
    )
    accesses = np.concatenate([[0.0], np.cumsum(partitions.accesses[order])]) / max(
        1e-300, partitions.accesses.sum()
    )
    places = np.unique(np.geomspace(1, len(order), CURVE_POINTS).astype(int))
    return [(float(rows[place]), float(accesses[place])) for place in places]
