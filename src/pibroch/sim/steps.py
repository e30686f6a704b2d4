"""What the threads of a rank do in a step, exchange by exchange: the order of a run.

``alltoall``: :mod:`pibroch.exchange.prefetching`; ``lookahead``: the README of that exchange;
``towers``: :mod:`pibroch.exchange.towers.exchange`; sums of dense gradients:
:mod:`pibroch.collectives.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.sim.cluster import Flow
from pibroch.sim.counting import StepCount
from pibroch.sim.counting_towers import ByTowers, PlacedModules
from pibroch.sim.lockstep import Operation
from pibroch.sim.machine import DenseCost
from pibroch.sim.program import COMMUNICATION, PLANNER, TRAINING, Program
from pibroch.sim.timeline import Tasks


@dataclass(frozen=True, slots=True)
class Dense:
    """The dense model of each rank.

    Attributes:
        cost: of a step.
        num_samples: of a rank's batch.
        towers: whose modules run where their tables are; ``None`` for a model that is whole.
    """

    cost: DenseCost
    num_samples: int
    towers: ByTowers | None = None

    def seconds(self, part: str) -> float:
        """Of a part of the step."""
        call, sample = getattr(self.cost, part)
        return float(call + sample * self.num_samples)

    @property
    def modules(self) -> PlacedModules | None:
        """Of towers that run where their tables are."""
        return None if self.towers is None else self.towers.modules

    @property
    def parameter_bytes(self) -> int:
        """Of the rank that has most."""
        whole = self.cost.early_bytes + self.cost.late_bytes
        if self.modules is None:
            return whole
        return sum(self.sum_bytes) + max(self.modules.num_bytes)

    @property
    def sum_bytes(self) -> tuple[int, int]:
        """Of gradients that all ranks sum, early and late ones."""
        early = self.cost.early_bytes
        late = self.cost.late_bytes
        inside = 0 if self.modules is None else sum(self.modules.num_bytes)
        return max(0, early - inside), late - max(0, inside - early)

    def sums(self, hosts: NDArray[np.int64]) -> list[Flow]:
        """What sums of gradients send a step."""
        flows = [Flow.ring(sum(self.sum_bytes), hosts)]
        if self.towers is not None and self.modules is not None:
            flows.append(self.sums_inside(self.towers, self.modules, hosts))
        return flows

    @staticmethod
    def sums_inside(towers: ByTowers, modules: PlacedModules, hosts: NDArray[np.int64]) -> Flow:
        """What sums of the gradients of modules send, each over its group of hosts."""
        return Flow.rings(modules.num_bytes, towers.places.groups, hosts)


def alltoall(program: Program, counts: Sequence[StepCount], dense: Dense, num_steps: int) -> None:
    """Steps of ``alltoall``: ids go out a step ahead, rows after the update before them."""
    first = counts[0]
    program.operation(TRAINING, first["read"])
    routed = program.operation(COMMUNICATION, first["route"], [program.last(TRAINING)])
    fetched = program.operation(COMMUNICATION, first["fetch"], [routed])
    for number in range(num_steps):
        count = counts[number % len(counts)]
        following = counts[(number + 1) % len(counts)]
        program.operation(TRAINING, following["read"])
        program.operation(COMMUNICATION, following["route"], [program.last(TRAINING)])
        program.work(TRAINING, "dense", dense.seconds("begin"))
        program.wait(TRAINING, "rows", fetched)
        program.operation(TRAINING, count["pool"])
        program.work(TRAINING, "dense", dense.seconds("forward"))
        program.work(TRAINING, "dense", dense.seconds("backward"))
        program.operation(TRAINING, count["combine"])
        summed = _sum(program, dense.cost.early_bytes, program.last(TRAINING))
        program.operation(COMMUNICATION, count["update"], [program.last(TRAINING)])
        program.work(TRAINING, "dense", dense.seconds("rest"))
        late = _sum(program, dense.cost.late_bytes, program.last(TRAINING))
        fetched = program.operation(COMMUNICATION, following["fetch"], [program.last(TRAINING)])
        for tasks in (summed, late):
            if tasks is not None:
                program.wait(TRAINING, "sums", tasks)
        program.work(TRAINING, "dense", dense.cost.optimizer)
        program.wait(TRAINING, "step", program.last(TRAINING))


def lookahead(program: Program, counts: Sequence[StepCount], dense: Dense, num_steps: int) -> None:
    """Steps of ``lookahead``: critical gradients and rows first, the rest beside the next step."""
    planned: Tasks | None = None
    places: Tasks | None = None
    for number in range(num_steps):
        count = counts[number % len(counts)]
        program.operation(TRAINING, count["read"])
        program.work(TRAINING, "dense", dense.seconds("begin"))
        if places is not None:
            program.wait(TRAINING, "rows", places)
        program.operation(TRAINING, count["pool"])
        program.work(TRAINING, "dense", dense.seconds("forward"))
        program.work(TRAINING, "dense", dense.seconds("backward"))
        if planned is not None:
            program.wait(TRAINING, "plan", planned)
        program.operation(TRAINING, count["combine"])
        combined = program.last(TRAINING)
        local = program.operation(PLANNER, count["local"], [combined])
        summed = _sum(program, dense.cost.early_bytes, combined)
        program.operation(COMMUNICATION, count["critical"], [combined])
        if count.has("settle tight"):
            program.operation(COMMUNICATION, count["settle tight"], [local])
        program.work(TRAINING, "dense", dense.seconds("rest"))
        late = _sum(program, dense.cost.late_bytes, program.last(TRAINING))
        ended = program.last(TRAINING)
        places = program.operation(COMMUNICATION, count["deliver"], [ended])
        if not count.has("settle tight"):
            program.operation(COMMUNICATION, count["settle"], [local])
        prepared = program.operation(PLANNER, count["prepare"], [ended])
        planned = program.operation(PLANNER, count["plan"])
        announced = program.operation(COMMUNICATION, count["announce"], [prepared])
        program.operation(PLANNER, count["add"], [announced])
        for tasks in (summed, late):
            if tasks is not None:
                program.wait(TRAINING, "sums", tasks)
        program.work(TRAINING, "dense", dense.cost.optimizer)
        program.wait(TRAINING, "step", program.last(TRAINING))


def towers(program: Program, counts: Sequence[StepCount], dense: Dense, num_steps: int) -> None:
    """Steps of ``towers``: as ``alltoall``, by peers; outputs of modules travel while all wait."""
    modules = dense.modules
    work = 0.0 if dense.towers is None else dense.towers.work

    def announce(count: StepCount) -> None:
        program.operation(TRAINING, count["read"])
        program.operation(COMMUNICATION, count["peer ids"], [program.last(TRAINING)])
        program.operation(COMMUNICATION, count["tower route"])

    def fetch(count: StepCount) -> Tasks:
        fetched = program.operation(COMMUNICATION, count["tower fetch"], [program.last(TRAINING)])
        return fetched if modules else program.operation(COMMUNICATION, count["embeddings"])

    def across(operation: Operation) -> None:
        program.operation(COMMUNICATION, operation, [program.last(TRAINING)])
        program.wait(TRAINING, operation.name, program.last(COMMUNICATION))

    announce(counts[0])
    fetched = fetch(counts[0])
    for number in range(num_steps):
        count = counts[number % len(counts)]
        following = counts[(number + 1) % len(counts)]
        announce(following)
        program.work(TRAINING, "dense", dense.seconds("begin"))
        program.wait(TRAINING, "rows", fetched)
        program.operation(TRAINING, count["put"])
        inside = 0.0
        if modules:
            inside = dense.seconds("towers_forward")
            program.work(TRAINING, "towers", inside * work)
            across(count["embeddings"])
        program.work(TRAINING, "dense", dense.seconds("forward") - inside)
        inside = dense.seconds("towers_backward") if modules else 0.0
        program.work(TRAINING, "dense", dense.seconds("backward") - inside)
        early, late = dense.sum_bytes
        if not modules:
            program.operation(TRAINING, count["take"])
        sums = [_sum(program, early, program.last(TRAINING))]
        if dense.towers is not None and modules:
            across(count["gradients"])
            program.work(TRAINING, "towers", inside * work)
            sums.append(_sum_inside(program, dense.towers, modules))
        else:
            program.operation(COMMUNICATION, count["gradients"], [program.last(TRAINING)])
        program.operation(COMMUNICATION, count["tower update"], [program.last(TRAINING)])
        program.work(TRAINING, "dense", dense.seconds("rest"))
        sums.append(_sum(program, late, program.last(TRAINING)))
        fetched = fetch(following)
        for tasks in sums:
            if tasks is not None:
                program.wait(TRAINING, "sums", tasks)
        program.work(TRAINING, "dense", dense.cost.optimizer)
        program.wait(TRAINING, "step", program.last(TRAINING))


STEPS = {"alltoall": alltoall, "lookahead": lookahead, "towers": towers}


def _sum(program: Program, num_bytes: int, after: Tasks) -> Tasks | None:
    """A sum of dense gradients over all ranks, on the communication thread: gloo's ring."""
    size = program.cluster.num_ranks
    if size == 1 or not num_bytes:
        return None
    program.wait(COMMUNICATION, "sums", after)
    flow = Flow.ring(num_bytes, program.cluster.host_of_rank)
    summed = np.full(size, float(num_bytes))
    return program.exchange(COMMUNICATION, "sums", flow, 2 * (size - 1), summed=summed)


def _sum_inside(program: Program, towers: ByTowers, modules: PlacedModules) -> Tasks:
    """A sum of the gradients of modules over each group of hosts, likewise."""
    groups = towers.places.groups
    program.wait(COMMUNICATION, "sums", program.last(TRAINING))
    flow = Dense.sums_inside(towers, modules, program.cluster.host_of_rank)
    rounds, summed = (np.zeros(program.cluster.num_ranks) for _ in range(2))
    for members, num_bytes in zip(groups, modules.num_bytes, strict=True):
        rounds[list(members)] = 2 * (len(members) - 1)
        summed[list(members)] = num_bytes
    return program.exchange(COMMUNICATION, "sums", flow, rounds, groups, summed)


def step_seconds(program: Program, num_steps: int, warm_up: int) -> tuple[float, dict[str, float]]:
    """The mean time of steps after some, and of the training thread's time by what it did.

    Waiting is under ``waiting for`` what was waited for.
    """
    begin, end = program.run()
    spans = [each for each in program.spans if each.thread == TRAINING]
    marks = [end[each.tasks] for each in spans if each.name == "step"]
    seconds = float((marks[-1] - marks[warm_up - 1]).mean() / (num_steps - warm_up))
    parts: dict[str, float] = {}
    since = marks[warm_up - 1]
    last = since
    for span in spans:
        ends = end[span.tasks]
        if (ends <= since).all() or span.name == "step":
            continue
        waited = np.maximum(0.0, begin[span.tasks] - last).mean()
        worked = (ends - np.maximum(begin[span.tasks], since)).mean()
        if waited > 0:
            name = f"waiting for {span.name}"
            parts[name] = parts.get(name, 0.0) + float(waited)
        if worked > 0:
            parts[span.name] = parts.get(span.name, 0.0) + float(worked)
        last = ends
    steps = num_steps - warm_up
    return seconds, {name: value / steps for name, value in parts.items()}
