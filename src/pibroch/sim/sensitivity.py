"""What would help most: a step with twice of one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pibroch.sim.cluster import Cluster
from pibroch.sim.counting import StepCount
from pibroch.sim.machine import DenseCost, Link, Machine, PartCost
from pibroch.sim.prediction import Conditions, predict


def sensitivity(counts: Sequence[StepCount], conditions: Conditions) -> dict[str, float]:
    """Seconds of a step if one thing were twice as fast, or as many, by the name of the thing."""
    return {name: predict(counts, improved).step_s for name, improved in _improved(conditions)}


def _improved(conditions: Conditions) -> Iterator[tuple[str, Conditions]]:
    cluster = conditions.cluster
    machine = conditions.machine
    dense = conditions.dense

    def on(better: Cluster) -> Conditions:
        return replace(conditions, cluster=better)

    if cluster.num_hosts > 1:
        yield "link of each host", on(replace(cluster, link=2 * cluster.link))
    if cluster.ranks_per_host > 1:
        yield "links within a host", on(replace(cluster, local=2 * cluster.local))
    if machine.accelerator is None:
        yield "cores", on(replace(cluster, cores=2 * cluster.cores))
    quicker_layers = replace(dense, cost=_halved(dense.cost))
    yield "speed of dense layers", replace(conditions, dense=quicker_layers)
    yield "speed of work on rows", replace(conditions, machine=_with_faster_rows(machine))
    links = {name: _quicker(getattr(machine, name)) for name in ("network", "memory")}
    if machine.network.message_s or machine.memory.message_s:
        yield "speed of messages", replace(conditions, machine=machine.model_copy(update=links))


def _halved(cost: DenseCost) -> DenseCost:
    parts = {
        name: tuple(each / 2 for each in getattr(cost, name))
        for name in DenseCost.model_fields
        if isinstance(getattr(cost, name), tuple)
    }
    return cost.model_copy(update={**parts, "optimizer": cost.optimizer / 2})


def _with_faster_rows(machine: Machine) -> Machine:
    if machine.accelerator is not None:
        rate = 2 * machine.accelerator.memory_bytes_per_second
        faster = machine.accelerator.model_copy(update={"memory_bytes_per_second": rate})
        return machine.model_copy(update={"accelerator": faster})
    operations = {
        name: [PartCost(**{key: cost / 2 for key, cost in part}) for part in parts]
        for name, parts in machine.operations.items()
    }
    return machine.model_copy(update={"operations": operations})


def _quicker(link: Link) -> Link:
    names = ("message_s", "wait_s", "call_cpu_s", "byte_cpu_s")
    return link.model_copy(update={name: getattr(link, name) / 2 for name in names})
