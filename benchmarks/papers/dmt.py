"""Disaggregated multi-tower (MLSys'24): towers beside one all-to-all, Figures 10 to 12.

16K samples a rank of drawn data, one id a feature, hosts of 8 GPUs, links of Table 1; rows and
gradients travel in 16 bits, as in the paper's baseline. Time is that of data sheets.

Rows of equal tables are drawn evenly, so hardly one is read twice by a batch: what our all-to-all
sends for distinct rows is what the paper's sends for pooled vectors, 128 numbers an id. So what a
rank sends grows with its samples, and larger clusters are counted with fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import pibroch as pb
from benchmarks.papers.points import Point
from benchmarks.registry import Options
from pibroch.embedding import Table, TableGroup, group_tables
from pibroch.exchange.towers.build import TowerLayout
from pibroch.exchange.towers.modules import TowerOutputs
from pibroch.exchange.towers.places import hosts_of
from pibroch.models import build_model
from pibroch.models.base import Model
from pibroch.planner import Plan
from pibroch.sim.cluster import Cluster, bytes_per_second
from pibroch.sim.counting import Job, StepCount, count
from pibroch.sim.machine import Machine
from pibroch.sim.mirrored import EXACT_RANKS, count_few
from pibroch.sim.prediction import Conditions, Prediction, predict
from pibroch.sim.recipe import dense_cost, placed_modules
from pibroch.sim.steps import Dense
from pibroch.sim.towers import ByTowers, plan_of

PAPER = "DMT"
FEATURES = tuple(f"C{number}" for number in range(26))
DIM = 128
NUM_DENSE = 13
NUM_ROWS = 22_780_000_000 // DIM // len(FEATURES)
"""Of a table: Table 3 says 22.78 G parameters in all."""
SAMPLES = 16_384
GPUS_PER_HOST = 8
LINKS = {"V100": "800gbit", "A100": "1600gbit", "H100": "3200gbit"}
"""Of a host, by Table 1: 100, 200 and 400 Gbit/s a GPU."""
LOCAL = {"V100": 150e9, "A100": 300e9, "H100": 450e9}
"""Bytes a second of NVLink, by Table 1."""
MOST_HOSTS = {"V100": 16, "A100": 64, "H100": 64}
WIRE = "float16"
UTILISATIONS = (1.0, 0.3)
"""Of dense layers; the paper gives none."""
LINK_SHARES = (0.5, 0.25, 0.1)
DCN_HOSTS = 16
"""With more there are more towers than the paper's have modules."""
SPEEDUP = "throughput, towers over one all-to-all"
MOST = {"DLRM": 1.9, "DCN": 1.8}
WAITS = ("waiting for rows", "waiting for embeddings", "waiting for gradients")
COUNTED_SAMPLES = {2: 2048, 8: 2048, 16: 1024, 32: 512, 64: 256}
"""Of a rank, by hosts."""
DLRM: dict[str, Any] = {"bottom": (512, 256), "top": (1024, 512, 256)}
DCN: dict[str, Any] = {
    "bottom": (512, 256),
    "top": (1024, 1024, 512, 256),
    "cross_layers": 3,
    "cross_rank": 512,
}


@dataclass(frozen=True, slots=True)
class Counted:
    """Steps of a model on so many hosts, for any hardware."""

    counts: Sequence[StepCount]
    model: Model
    towers: ByTowers | None

    def on(
        self, device: str, num_hosts: int, utilisation: float = 1.0, share: float = 1.0
    ) -> Prediction:
        """A step where dense layers and links reach a share of their data sheets."""
        machine = Machine.load(device.lower())
        link = share * bytes_per_second(LINKS[device])
        cluster = Cluster(num_hosts, GPUS_PER_HOST, link, LOCAL[device], float(machine.cores))
        dense = Dense(dense_cost(self.model, machine, utilisation), SAMPLES, self.towers)
        return predict(self.counts, Conditions(cluster, machine, dense))


class Hosts:
    """So many hosts, and what ranks send there.

    Args:
        num_hosts: of eight ranks.
        samples: of a rank, with which towers are counted.
    """

    def __init__(self, num_hosts: int, samples: int) -> None:
        self.num_hosts = num_hosts
        self._samples = samples
        self._num_ranks = num_hosts * GPUS_PER_HOST
        self._tables = [Table(name, NUM_ROWS, DIM) for name in FEATURES]
        self._groups: Sequence[TableGroup] = group_tables(self._tables, pb.RowWiseAdagrad(lr=0.1))

    @property
    def num_towers(self) -> int:
        """As many as hosts, where there are features for as many."""
        return min(self.num_hosts, len(FEATURES))

    def one_alltoall(self, model: Model) -> Counted:
        """The baseline."""
        plan = Plan.of(self._tables, self._num_ranks, "row_wise")
        job = Job(self._groups, plan, partial(drawn_batch, SAMPLES), pb.AllToAll(wire=WIRE))
        if self._num_ranks > EXACT_RANKS:
            counts, _ = count_few(job, GPUS_PER_HOST, 1)
        else:
            counts = count(job, 1)
        return Counted(counts, model, None)

    def by_towers(self, model: Model) -> Counted:
        """The paper's: the modules of a model where their tables are, or none for one without."""
        features = [list(FEATURES[tower :: self.num_towers]) for tower in range(self.num_towers)]
        topology = hosts_of(self._num_ranks, GPUS_PER_HOST)
        exchange = pb.Towers(groups=features, wire=WIRE, ranks_per_host=GPUS_PER_HOST)
        layout = TowerLayout.of(exchange, self._groups, topology)
        outputs = TowerOutputs.of(model, self._tables, layout.here)
        modules = None if outputs is None else placed_modules(model, outputs)
        batches = partial(drawn_batch, self._samples)
        job = Job(self._groups, plan_of(layout), batches, exchange, modules=modules)
        factor = SAMPLES / self._samples
        counts = [scaled(each, factor) for each in count(job, 1)]
        return Counted(counts, model, ByTowers(layout.places, layout.here, modules))


def drawn_batch(samples: int, step: int, rank: int) -> pb.JaggedBatch:
    """Ids of which all are alike."""
    rng = np.random.default_rng([step, rank])
    ids = rng.integers(NUM_ROWS, size=(len(FEATURES), samples))
    dense = torch.zeros(samples, NUM_DENSE)
    return pb.JaggedBatch.from_one_hot(dense, FEATURES, torch.from_numpy(ids), dense[:, 0])


def scaled(step: StepCount, factor: float) -> StepCount:
    """So many times what ranks do and send."""
    operations = [
        replace(
            each,
            parts=[factor * part for part in each.parts],
            sent=[factor * sent for sent in each.sent],
        )
        for each in step.operations
    ]
    return StepCount(step.schedule, operations, held=step.held)


def dlrm(towers: int | None = None, width: int = 64) -> Model:
    """The paper's, whose flops are those of its Tables 4 and 5."""
    if towers is None:
        top = (1024, *DLRM["top"])
        return build_model("dlrm", NUM_DENSE, 26, FEATURES, dim=DIM, **DLRM | {"top": top})
    options: dict[str, Any] = {"count": towers, "width": width}
    return build_model("tower_dlrm", NUM_DENSE, 26, FEATURES, dim=DIM, **DLRM, towers=options)


def dcn(towers: int | None = None) -> Model:
    """Likewise."""
    options: dict[str, Any] = (
        {"pass_through": True} if towers is None else {"count": towers, "rank": 512}
    )
    return build_model("tower_dcn", NUM_DENSE, 26, FEATURES, dim=DIM, **DCN, towers=options)


def points(options: Options) -> Iterator[Point]:
    """All that is compared; five minutes on two cores."""
    speedups: dict[str, list[Speedup]] = {"DLRM": [], "DCN": []}
    for num_hosts in (2,) if options.quick else COUNTED_SAMPLES:
        options.say(f"DMT: {num_hosts * GPUS_PER_HOST} GPUs")
        hosts = Hosts(num_hosts, COUNTED_SAMPLES[num_hosts])
        base = hosts.one_alltoall(dlrm())
        ours = hosts.by_towers(dlrm(hosts.num_towers))
        speedups["DLRM"] += by_hardware("DLRM", hosts, base, ours)
        yield of_links(hosts, base, ours)
        yield from at_one_scale(hosts, base, ours)
        if num_hosts <= DCN_HOSTS:
            wide = replace(base, model=dcn())
            crossed = hosts.by_towers(dcn(hosts.num_towers))
            speedups["DCN"] += by_hardware("DCN", hosts, wide, crossed)
            if num_hosts == 8:
                yield from latencies(wide, crossed)
    for name, least in (("DLRM", 8), ("DCN", 2)):
        own = [each for each in speedups[name] if each.num_hosts >= least]
        for each in speedups[name]:
            yield each.point
        if own:
            most = max(each.point.predicted for each in own)
            where = f"{name}, most of {least * GPUS_PER_HOST} GPUs and more"
            yield Point(PAPER, "Fig. 10", where, SPEEDUP, MOST[name], most)


class Speedup(NamedTuple):
    """A point of Figure 10."""

    num_hosts: int
    point: Point


def by_hardware(name: str, hosts: Hosts, base: Counted, ours: Counted) -> list[Speedup]:
    """Of all hardware of which the paper has so many hosts."""
    return [
        Speedup(
            hosts.num_hosts,
            Point(
                PAPER,
                "Fig. 10",
                f"{hosts.num_hosts * GPUS_PER_HOST} {device}, {name}, dense layers at"
                f" {utilisation:.0%} of their rate",
                SPEEDUP,
                None,
                ratio(base, ours, device, hosts, utilisation),
            ),
        )
        for device, most in MOST_HOSTS.items()
        if hosts.num_hosts <= most
        for utilisation in UTILISATIONS
    ]


def of_links(hosts: Hosts, base: Counted, ours: Counted) -> Point:
    """What throughput could gain where links alone took time."""
    before, after = (
        float(each.on("A100", hosts.num_hosts).link_bytes.max()) for each in (base, ours)
    )
    setting = f"{hosts.num_hosts * GPUS_PER_HOST} GPUs, DLRM"
    what = "bytes of the busiest host's link, one all-to-all over towers"
    return Point(PAPER, "Fig. 10", setting, what, None, before / after)


def at_one_scale(hosts: Hosts, base: Counted, ours: Counted) -> Iterator[Point]:
    """What the paper shows of some numbers of hosts alone."""
    num_hosts = hosts.num_hosts
    setting = f"{num_hosts * GPUS_PER_HOST} A100, DLRM"
    if num_hosts == 2:
        whole = Hosts(2, SAMPLES).by_towers(dlrm(2))
        what = f"a step, counted with {COUNTED_SAMPLES[2]:,} samples a rank over all {SAMPLES:,}"
        yield Point(PAPER, "Fig. 10", setting, what, None, ratio(ours, whole, "A100", hosts))
    if num_hosts == 8:
        narrow = hosts.by_towers(dlrm(8, width=8))
        gain = ratio(base, narrow, "A100", hosts)
        yield Point(PAPER, "Fig. 12", f"{setting}, compressed by 16", SPEEDUP, 2.0, gain)
        for share in LINK_SHARES:
            slower = ratio(base, ours, "A100", hosts, share=share)
            where = f"{setting}, links at {share:.0%} of their rate"
            yield Point(PAPER, "Fig. 5, 10", where, SPEEDUP, None, slower)
    if num_hosts in (8, 64):
        through = hosts.by_towers(dlrm())
        what = "throughput, modules over passing through"
        in_paper = 1.4 if num_hosts == 64 else None
        gain = ratio(through, ours, "A100", hosts)
        yield Point(PAPER, "Fig. 11", setting, what, in_paper, gain)


def latencies(base: Counted, ours: Counted) -> Iterator[Point]:
    """Figure 13: what is saved of the parts of a step."""
    before, after = (each.on("H100", 8).parts_s for each in (base, ours))
    for what, names, in_paper in (
        ("compute", ("dense", "towers"), 1.4),
        ("embedding communication that is waited for", WAITS, 4.6),
    ):
        one, other = (sum(parts.get(name, 0.0) for name in names) for parts in (before, after))
        yield Point(PAPER, "Fig. 13", "64 H100, DCN", f"time of {what}", in_paper, one / other)


def ratio(
    base: Counted,
    ours: Counted,
    device: str,
    hosts: Hosts,
    utilisation: float = 1.0,
    share: float = 1.0,
) -> float:
    """Throughput over that of the first."""
    before, after = (each.on(device, hosts.num_hosts, utilisation, share) for each in (base, ours))
    return before.step_s / after.step_s
