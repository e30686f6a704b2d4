"""What the threads of a rank do in a step, exchange by exchange: the order of a run.

``alltoall``: :mod:`pibroch.exchange.prefetching`; ``lookahead``: the README of that exchange; sums
of dense gradients: :mod:`pibroch.collectives.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.sim.cluster import Flow
from pibroch.sim.counting import StepCount
from pibroch.sim.machine import DenseCost
from pibroch.sim.program import COMMUNICATION, PLANNER, TRAINING, Program
from pibroch.sim.timeline import Tasks


@dataclass(frozen=True, slots=True)
class Dense:
    """The dense model of each rank.

    Attributes:
        cost: of a step.
        num_samples: of a rank's batch.
    """

    cost: DenseCost
    num_samples: int

    def seconds(self, part: str) -> float:
        """Of a part of the step."""
        call, sample = getattr(self.cost, part)
        return float(call + sample * self.num_samples)


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


STEPS = {"alltoall": alltoall, "lookahead": lookahead}


def _sum(program: Program, num_bytes: int, after: Tasks) -> Tasks | None:
    """A sum of dense gradients over all ranks, on the communication thread: gloo's ring."""
    size = program.cluster.num_ranks
    if size == 1 or not num_bytes:
        return None
    program.wait(COMMUNICATION, "sums", after)
    flow = Flow.ring(num_bytes, program.cluster.host_of_rank)
    return program.exchange(COMMUNICATION, "sums", flow, 2 * (size - 1))


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
