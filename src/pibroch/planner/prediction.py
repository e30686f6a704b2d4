"""What a plan is predicted to cost, and how it came about.

Plain values, kept with the plan.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Matrix = list[list[float]]


class BudgetStep(BaseModel):
    """What a budget of extra memory buys.

    Attributes:
        extra: share of the tables' bytes.
        mean_link: cost a step, over all pairs of shards.
        worst_link: and that of the dearest.
        crossing: share of accesses that leave their rank.
    """

    model_config = ConfigDict(frozen=True)

    extra: float
    mean_link: float
    worst_link: float
    crossing: float


class PolicyForecast(BaseModel):
    """What a way to choose copies would give with the same partitions, before the search.

    Attributes:
        policy: its name.
        copied_rows: rows with at least one copy.
        mean_link: cost a step, over all pairs of shards.
        worst_link: and that of the dearest.
        read_bytes: of rows that cross a step, each distinct one of a rank once.
        sync_bytes: of gradients and sums that cross a step; 0 for inference.
    """

    model_config = ConfigDict(frozen=True)

    policy: str
    copied_rows: int
    mean_link: float
    worst_link: float
    read_bytes: float
    sync_bytes: float


class PartitionReads(BaseModel):
    """How often rows of each of P partitions were read in the profile, sums over their rows.

    Attributes:
        num_rows: of each partition.
        accesses: a sample.
        batches: share of the profile's batches.
        dims: floats of each of its rows.
        batch_size: samples of the profile's batches.
    """

    model_config = ConfigDict(frozen=True)

    num_rows: list[int]
    accesses: list[float]
    batches: list[float]
    dims: list[int]
    batch_size: int


class PlanPrediction(BaseModel):
    """All figures are for one step; W shards.

    Attributes:
        mode: inference or training.
        policy: how copies were chosen, see ``planner.replicate``.
        objective: the form of Eq. 3 that was planned for: accesses or transfers.
        fingerprint: of the data that were profiled.
        batch_size: samples of a rank's batch.
        threshold: on accesses and memory of a partition (Sec. 4.1).
        num_partitions: P.
        num_rows: of all tables.
        table_bytes: of all records once.
        extra: share of them that copies may take.
        used_extra: share that they take.
        memory_bytes: Eq. 1, ``[W]``.
        room_bytes: that each shard may hold, ``[W]``.
        lookups: rows that each looks up, for all readers, ``[W]``.
        lookup_bytes: Eq. 2 in bytes, ``[W]``.
        read_bytes: by form, what rank i gets from shard j, its own reads on the diagonal, ``[W,
            W]``.
        link_cost: Eq. 3 for the objective, ``[W, W]``.
        sync_bytes: what i sends to j for gradients and replicas in training, ``[W, W]``; zeros for
            inference.
        crossing: by form, the share of what is read that comes from another shard.
        least_crossing: share of accesses that cross at least, whatever is copied within the budget:
            with the hottest rows on all shards.
        copied_rows: rows with at least one copy.
        copies: of rows, beside their homes.
        worst_link_bound: below which no placement's worst link can be; ``None`` where it was not
            worked out.
        payload_bytes: what rank i sends rank j in all a step under the exchange ``alltoall`` where
            copies' gradients are gathered, ``[W, W]``; ``None`` in plans of before it was worked
            out.
        reads: of each partition, from which the payload of other batches follows; ``None`` for
            inference.
        balance: degrees of balance: ``memory``, ``workload`` (Sec. 4.2), ``communication`` (Table
            3, of the objective).
        curve: points of the access curve: share of rows, most read first, and their share of
            accesses.
        hot_share: share of rows that have copies, for the curve.
        steps: what each budget would buy.
        policies: what each policy of the mode would give; the chosen one is ``policy``.
        hosts: host of each rank.
        warnings: what a reader should know.
    """

    model_config = ConfigDict(frozen=True)

    mode: str
    policy: str
    objective: str
    fingerprint: str
    batch_size: int
    threshold: float
    num_partitions: int
    num_rows: int
    table_bytes: int
    extra: float
    used_extra: float
    memory_bytes: list[float]
    room_bytes: list[float]
    lookups: list[float]
    lookup_bytes: list[float]
    read_bytes: dict[str, Matrix]
    link_cost: Matrix
    sync_bytes: Matrix
    crossing: dict[str, float]
    least_crossing: float
    copied_rows: int
    copies: int
    worst_link_bound: float | None = None
    payload_bytes: Matrix | None = None
    reads: PartitionReads | None = None
    balance: dict[str, float]
    curve: list[tuple[float, float]]
    hot_share: float
    steps: list[BudgetStep] = []
    policies: list[PolicyForecast] = []
    hosts: list[int]
    warnings: list[str] = []

    @property
    def num_shards(self) -> int:
        """W."""
        return len(self.memory_bytes)
