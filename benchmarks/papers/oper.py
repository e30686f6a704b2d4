"""OPER (ATC'24): links with copied rows beside those without, Table 2 and Figures 6, 7 and 9.

Plans for the Kaggle log, extrapolated from a sample of it, over eight GPUs. Costs count accesses,
as the paper's do: a batch that reads a row twice fetches it twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.points import Point
from benchmarks.planner_baselines import baselines
from benchmarks.planner_cases import Setting, baseline_row, criteo, measured, plan_row
from benchmarks.registry import Options
from pibroch.planner.make import PlanOptions
from pibroch.planner.topology import ClusterTopology

PAPER = "OPER"
MEAN_MB = {0.0: 3.25, 0.01: 0.46, 0.02: 0.30, 0.05: 0.24, 0.1: 0.20, 0.2: 0.18}
"""Table 2, Kaggle: of a link, by extra memory."""
EXTRA = 0.05
NUM_GPUS = 8
BETWEEN_HOSTS = 4.21
"""Cost of a link between hosts over one within (Sec. 6.3)."""
PLACEMENT = 1.79
NEAREST = "table_wise"
"""Of ours to what TorchRec makes for tables of one dim."""
COPIES = 2.26
MULTI_NODE = 2.76


def points(options: Options) -> Iterator[Point]:
    """All that is compared; minutes."""
    for case in criteo(options):
        one_host = ClusterTopology.uniform(NUM_GPUS)
        means = {}
        worst = {}
        for extra in MEAN_MB:
            options.say(f"OPER: {extra:.0%} extra memory")
            row = links(case, one_host, extra)
            means[extra] = row["mean_link_kb"]
            worst[extra] = row["worst_link_kb"]
        setting = f"Kaggle, {NUM_GPUS} A100 of one host"
        for extra, in_paper in MEAN_MB.items():
            if extra:
                yield Point(
                    PAPER,
                    "Table 2",
                    f"{setting}, {extra:.0%} extra memory",
                    "bytes of the mean link, without copies over with them",
                    MEAN_MB[0.0] / in_paper,
                    means[0.0] / means[extra],
                )
        others = baselines(case.tables, case.profile, NUM_GPUS)
        what = "worst link, {} over ours without copies"
        for name, baseline in others.items():
            theirs = baseline_row(baseline, "accesses", one_host)["worst_link_kb"]
            shown = PLACEMENT if name == NEAREST else None
            yield Point(PAPER, "Fig. 9a", setting, what.format(name), shown, theirs / worst[0.0])
        yield Point(
            PAPER,
            "Fig. 9a",
            setting,
            "worst link, without copies over with them",
            COPIES,
            worst[0.0] / worst[EXTRA],
        )
        options.say("OPER: two hosts")
        two_hosts = ClusterTopology.hierarchical(2, 4, BETWEEN_HOSTS)
        without, copied = (links(case, two_hosts, extra)["worst_link_kb"] for extra in (0.0, EXTRA))
        yield Point(
            PAPER,
            "Fig. 7",
            "Kaggle, 2 hosts of 4 A100",
            "cost of the worst link, without copies over with them",
            MULTI_NODE,
            without / copied,
        )


def links(case: Setting, topology: ClusterTopology, extra: float) -> dict[str, float]:
    """Of a plan."""
    plan = measured(case, topology, PlanOptions(extra, objective="accesses", steps=False))
    return plan_row(plan, "accesses", topology)
