"""The cases of the topic ``planner``, and how a plan is measured.

Criteo extrapolated from a sample, Zipf ids, and random cases.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_baselines import Baseline
from benchmarks.registry import Options
from pibroch.data.dataset import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.observability.memory import peak_rss_bytes
from pibroch.planner import cost as costs
from pibroch.planner.count import CountOptions, count_dataset
from pibroch.planner.extrapolate import extrapolate
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import Form, Partitioner, Partitions, TableSize
from pibroch.planner.prediction import PlanPrediction
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.planner.topology import ClusterTopology

SAMPLE = (
    Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "criteo_kaggle_137k.tsv.gz"
)
KAGGLE_SAMPLES = 45_840_617
KAGGLE_ROWS = (
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
    27,
    14992,
    5461306,
    10,
    5652,
    2173,
    4,
    7046547,
    18,
    15,
    286181,
    105,
    142572,
)
"""Distinct values of C1 to C26 in the whole log: 33,762,577."""
DIM = 16
BATCH = 2048


@dataclass(frozen=True, slots=True)
class Setting:
    """What is planned.

    Attributes:
        name: of the data.
        profile: of them.
        tables: their sizes.
        note: where the profile comes from.
    """

    name: str
    profile: AccessProfile
    tables: list[TableSize]
    note: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan's prediction, the time that it took, and the process's peak memory.

    The profile counts towards the memory.
    """

    prediction: PlanPrediction
    seconds: float
    peak_gib: float


def zipf(options: Options) -> Setting:
    """26 tables of 1.3 million rows, exponent 1.05."""
    rows = 13_000 if options.quick else 1_300_000
    profile = zipf_profile({f"t{i}": rows for i in range(26)}, rows * 4)
    return Setting(
        "zipf",
        profile,
        _sizes(profile),
        f"zipf: 26 tables of {rows:,} rows, exponent 1.05, {rows * 4:,} samples",
    )


def criteo(options: Options) -> list[Setting]:
    """The Kaggle log, extrapolated from a uniform 0.3 % sample of it.

    Empty where the sample is absent.
    """
    path = Path(os.environ.get("PIBROCH_TEST_DATA", SAMPLE.parent)) / SAMPLE.name
    if not path.exists():
        return []
    out = options.scratch / "criteo"
    schema = criteo_schema(bins=False).with_changes(1, {})
    if not out.exists():
        options.say("preparing the sample")
        source = TextSource(path, schema.separator, schema.quotes, schema.columns)
        prepare(
            [source],
            schema,
            out,
            PrepareOptions(SplitRule.parse("none", 0)),
            lambda stage, fraction: None,
        )
    sample = count_dataset(EncodedDataset.open(out), CountOptions(BATCH))
    share = 0.01 if options.quick else 1.0
    samples = max(sample.num_samples, int(KAGGLE_SAMPLES * share))
    wanted = {
        name: max(int(rows * share), len(counts.accesses))
        for (name, counts), rows in zip(sample.tables.items(), KAGGLE_ROWS, strict=True)
    }
    options.say("extrapolating")
    profile = extrapolate(sample, samples, wanted)
    rows = sum(profile.num_rows.values())
    note = (
        f"criteo: {sample.num_samples:,} samples of the Kaggle log extrapolated to {samples:,} and"
        f" {rows:,} rows"
    )
    return [Setting("criteo", profile, _sizes(profile), note)]


def zipf_profile(
    num_rows: dict[str, int], num_samples: int, exponent: float = 1.05, seed: int = 0
) -> AccessProfile:
    """Each table read once a sample, batches alike."""
    rng = np.random.default_rng(seed)
    tables = {}
    num_batches = -(-num_samples // BATCH)
    for name, rows in num_rows.items():
        share = 1 / np.arange(1, rows + 1) ** exponent
        share /= share.sum()
        accesses = rng.permutation(rng.poisson(share * num_samples).astype(np.int64))
        occurs = np.minimum(accesses, np.ceil(num_batches * -np.expm1(-accesses / num_batches)))
        tables[name] = TableCounts(accesses, occurs.astype(np.int32))
    return AccessProfile(tables, num_samples, num_batches, BATCH, f"zipf {seed}")


def random_case(seed: int) -> tuple[Setting, ClusterTopology, float]:
    """Tables of several widths and skews, equal or hierarchical links, a budget.

    At least 10,000 rows.
    """
    rng = np.random.default_rng(seed)
    num_shards = int(rng.choice([2, 3, 4, 6, 8]))
    topology = ClusterTopology.uniform(num_shards)
    if num_shards % 2 == 0 and rng.random() < 0.5:
        topology = ClusterTopology.hierarchical(2, num_shards // 2, float(rng.uniform(1.5, 6)))
    num_tables = int(rng.integers(1, 6))
    num_samples = int(rng.integers(10_000, 200_000))
    tables: list[TableSize] = []
    results: dict[str, TableCounts] = {}
    for number in range(num_tables):
        name = f"t{number}"
        dim = int(rng.choice([8, 16, 32]))
        rows = int(rng.integers(10_000 // num_tables + 1, 20_000))
        results |= zipf_profile(
            {name: rows}, num_samples, rng.uniform(0.6, 1.3), seed * 10 + number
        ).tables
        tables.append(TableSize(name, rows, 4 * dim, 4 * dim + int(rng.choice([0, 4]))))
    profile = AccessProfile(results, num_samples, -(-num_samples // BATCH), BATCH, "random")
    return (
        Setting(f"case {seed}", profile, tables, ""),
        topology,
        float(rng.choice([0.01, 0.02, 0.05, 0.1, 0.2])),
    )


def few_rows(seed: int) -> tuple[Partitions, ClusterTopology, np.ndarray[Any, Any]]:
    """20 to 40 rows of one or two sizes, each a partition, on 2 to 4 shards, and their room."""
    rng = np.random.default_rng(seed)
    num_shards = int(rng.choice([2, 3, 4]))
    num_rows = int(rng.integers(20, 41))
    topology = ClusterTopology.uniform(num_shards)
    if num_shards == 4 and rng.random() < 0.5:
        topology = ClusterTopology.hierarchical(2, 2, float(rng.uniform(1.5, 5)))
    counts = rng.permutation(
        np.round(1000 / np.arange(1, num_rows + 1) ** rng.uniform(0.3, 1.2)) + 1
    ).astype(np.int64)
    dims = np.ones(num_rows, int) if rng.random() < 0.5 else rng.choice([1, 2], num_rows)
    results = {
        f"t{dim}": TableCounts(counts[dims == dim], counts[dims == dim].astype(np.int32))
        for dim in np.unique(dims)
    }
    tables = [
        TableSize(name, len(c.accesses), 4 * int(name[1:]), 4 * int(name[1:]))
        for name, c in results.items()
    ]
    memory = 4.0 * dims.sum()
    extra = rng.choice([0.1, 0.2, 0.4])
    room = 4 * np.ceil(memory / 4 * (1 + extra) / num_shards) + (4 if dims.max() > 1 else 0)
    partitions = Partitioner(tables, AccessProfile(results, 1000, 1001, 1, "few")).cut(0.0)
    assert partitions is not None, "some tens of rows"
    return partitions, topology, np.full(num_shards, room)


def measured(case: Setting, topology: ClusterTopology, options: PlanOptions) -> Measured:
    """Make a plan and look at the clock."""
    started = time.perf_counter()
    _, prediction = make_plan(case.tables, case.profile, topology, options)
    seconds = time.perf_counter() - started
    return Measured(prediction, seconds, peak_rss_bytes() / 2**30)


def plan_row(plan: Measured, form: Form, topology: ClusterTopology) -> dict[str, Any]:
    """Figures of a plan."""
    p = plan.prediction
    reads = np.array(p.read_bytes[form])
    return _figures(np.array(p.memory_bytes), np.array(p.lookup_bytes), reads, topology) | {
        "seconds": plan.seconds
    }


def baseline_row(baseline: Baseline, form: Form, topology: ClusterTopology) -> dict[str, Any]:
    """The same figures of a baseline."""
    return _figures(
        baseline.memory_bytes, baseline.lookup_bytes(), baseline.traffic(form), topology
    )


def _figures(memory: Any, lookups: Any, reads: Any, topology: ClusterTopology) -> dict[str, Any]:
    links = costs.links(reads * topology.cost)
    return {
        "most_memory_mb": memory.max() / 1e6,
        "balance_memory": costs.degree_of_balance(memory),
        "most_lookups_kb": lookups.max() / 1e3,
        "balance_lookups": costs.degree_of_balance(lookups),
        "mean_link_kb": links.mean() / 1e3,
        "worst_link_kb": links.max() / 1e3,
        "least_link_kb": links.min() / 1e3,
        "balance_links": costs.degree_of_balance(links),
        "deviation": float(links.std() / links.mean()) if links.mean() else 0.0,
        "crossing": float(1 - np.trace(reads) / reads.sum()),
    }


def _sizes(profile: AccessProfile) -> list[TableSize]:
    return [TableSize(name, rows, 4 * DIM, 4 * DIM) for name, rows in profile.num_rows.items()]
