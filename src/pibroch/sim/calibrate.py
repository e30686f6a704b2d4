"""Measures what a machine takes: rows, dense models, links; by as many processes at once as ranks.

Each process runs the ranks' own work (:mod:`pibroch.sim.counting`) with a clock, so that memory and
caches are shared as in a run. Costs are fitted to the times, none below zero. How much longer they
take within a step, and how long woken threads wait, whole steps of ``alltoall`` say.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch.nn.functional import binary_cross_entropy_with_logits

from pibroch.collectives import data_parallel
from pibroch.collectives.gradients import GradientReducer
from pibroch.collectives.ranks import Channel, Ranks
from pibroch.collectives.transports import TRANSPORT_VARIABLE
from pibroch.models import Towers as TowerModules
from pibroch.models.base import Model
from pibroch.models.flops import training_flops
from pibroch.sim.counting import StepCount, count
from pibroch.sim.machine import DenseCost, Link, Machine, PartCost, cpu_model, num_cores
from pibroch.sim.measuring import (
    EXCHANGES,
    TIMEOUT_S,
    Enter,
    Party,
    Sample,
    Say,
    in_turns,
    nowhere,
)
from pibroch.sim.operation import FEATURES
from pibroch.sim.process import ProcessBytes, process_bytes
from pibroch.sim.provenance import installed_versions
from pibroch.sim.whole_steps import fitted, measure_steps
from pibroch.sim.world import NoNetwork

MESSAGE_BYTES = (64, 1 << 16, 1 << 20, 1 << 22)
LARGE_BYTES = 1 << 22
COLD_BYTES = 1 << 26  # of buffers in turns: a step's messages are in no cache, either
ROUNDS = 12
STEPS = 8
WHOLE_STEPS = 24
WARM_UP = 3


def calibrate(
    samples: Sequence[Sample], name: str, say: Say, num_processes: int = 2, enter: Enter = nowhere
) -> Machine:
    """Measure this machine; it should do nothing else meanwhile. Blocks.

    Args:
        samples: to measure.
        name: of the machine.
        say: told what is measured.
        num_processes: that work at once, each with one thread.
        enter: called first in each process, with its rank: where it is to be on a network.

    Raises:
        PibrochError: when a process ends without an answer.
    """
    machine = calibrate_parts(samples, name, say, num_processes, enter)
    with in_turns(partial(measure_steps, samples, WHOLE_STEPS), num_processes, say, enter) as ask:
        return fitted(machine, ask())


def calibrate_parts(
    samples: Sequence[Sample], name: str, say: Say, num_processes: int = 2, enter: Enter = nowhere
) -> Machine:
    """As :func:`calibrate`, but for what whole steps say."""
    with in_turns(partial(_measure, samples), num_processes, say, enter) as ask:
        answers = ask()
    say("memory")
    return _machine(samples, answers, name, process_bytes())


def _measure(samples: Sequence[Sample], party: Party) -> Iterator[dict[str, Any]]:
    """What one process measures, at once."""
    answer: dict[str, Any] = {"dense": {}, "times": []}
    party.begin("links")
    answer["network"], answer["memory"] = _links(party.ranks)
    for sample in samples:
        for batch_size in sample.batch_sizes:
            party.begin(f"{sample.key}, {batch_size:,} samples, dense")
            answer["dense"][sample.key, batch_size] = _dense_times(
                sample.model(), batch_size, party.ranks
            )
            if sample.job is None:
                continue
            job = sample.job(batch_size)
            party.begin(f"{sample.key}, {batch_size:,} samples, rows")
            for exchange in EXCHANGES:
                answer["times"].append(_times(count(job.under(exchange), STEPS, WARM_UP)))
                party.barrier.wait(TIMEOUT_S)
    yield answer


def _times(steps: Sequence[StepCount]) -> dict[tuple[str, int], tuple[np.ndarray, float]]:
    """Of each part the mean of what it is about, and the median of its times."""
    about: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for operation in step.operations:
            for number, part in enumerate(operation.parts):
                about[operation.name, number] += list(part)
                seconds[operation.name, number] += list(operation.seconds[number])
    return {key: (np.mean(about[key], axis=0), float(np.median(seconds[key]))) for key in about}


def _dense_times(model: Model, batch_size: int, ranks: Ranks) -> dict[str, float]:
    """Median seconds of each part of a dense step, their spread, and bytes of gradients.

    The model is one of all ranks, so that its gradients are summed meanwhile; the wait for the sums
    is left out.
    """
    clock = time.perf_counter
    model = data_parallel(model, ranks)
    marks: dict[str, float] = {}
    dense = torch.rand(batch_size, model.num_dense)
    labels = (torch.rand(batch_size) < 0.3).float()
    rows = torch.randn(batch_size, model.num_features, model.table_dim(model.config.dim)) * 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    arrived: set[str] = set()
    early: set[str] = set()
    for towers in (module for module in model.modules() if isinstance(module, TowerModules)):
        towers.register_forward_hook(partial(_note_towers, marks, clock))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.add(name))

    def look_up() -> torch.Tensor:
        marks["lookup"] = clock()
        embedded = rows.detach().requires_grad_()
        embedded.register_hook(note)
        return embedded

    def note(_: torch.Tensor) -> None:
        marks["gradient"] = clock()
        early.update(arrived)

    times = defaultdict(list)
    for _ in range(ROUNDS + WARM_UP):
        optimizer.zero_grad()
        arrived.clear()
        early.clear()
        waited = ranks.traffic.waited_s
        marks.clear()
        start = clock()
        loss = binary_cross_entropy_with_logits(model(dense, look_up), labels)
        forward = clock()
        loss.backward()
        backward = clock()
        optimizer.step()
        end = clock()
        parts = {
            "begin": marks["lookup"] - start,
            "forward": forward - marks["lookup"],
            "backward": marks["gradient"] - forward,
            "rest": backward - marks["gradient"] - (ranks.traffic.waited_s - waited),
            "optimizer": end - backward,
            "towers_forward": marks.get("towers", marks["lookup"]) - marks["lookup"],
            "towers_backward": marks["gradient"] - marks.get("outputs", marks["gradient"]),
        }
        for name, seconds in parts.items():
            times[name].append(seconds)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    reducer = GradientReducer(Channel(Ranks(0, 2), NoNetwork()), list(model.parameters()))
    sizes = [
        (bucket.flat.nbytes, all(named[id(each())] in early for each in bucket.parameters))
        for bucket in reducer.buckets
    ]
    spreads = [np.log(times[name][WARM_UP:]).std() for name in ("forward", "backward")]
    return {name: float(np.median(values[WARM_UP:])) for name, values in times.items()} | {
        "jitter": float(np.mean(spreads)),
        "early_bytes": sum(size for size, is_early in sizes if is_early),
        "late_bytes": sum(size for size, is_early in sizes if not is_early),
        "flops": training_flops(model),
    }


def _note_towers(
    marks: dict[str, float],
    clock: Callable[[], float],
    _: object,
    __: object,
    outputs: torch.Tensor,
) -> None:
    """Note when towers have given their outputs, and when the gradient of these is there."""
    marks["towers"] = clock()
    outputs.register_hook(lambda _: marks.update(outputs=clock()))


def _links(ranks: Ranks) -> tuple[Link, Link]:
    """Between two processes: over sockets, and through shared memory."""
    if ranks.world_size == 1:
        return Link(), Link()
    links = []
    for transport in ("auto", "gloo"):  # the second one is that of a lab, for what follows
        os.environ[TRANSPORT_VARIABLE] = transport
        channel = Channel(ranks)
        links.append(_link(channel))
        channel.close()
    return links[1], links[0]


def _link(channel: Channel) -> Link:
    size = channel.ranks.world_size
    wall: list[float] = []
    cpu: list[float] = []
    for num_bytes in MESSAGE_BYTES:
        num_buffers = min(ROUNDS, max(1, COLD_BYTES // (size * num_bytes)))
        buffers = torch.zeros(num_buffers, 2, size * num_bytes, dtype=torch.uint8)
        counts = [num_bytes] * size
        walls: list[float] = []
        cpus: list[float] = []
        busy = _busy_s()
        for number in range(ROUNDS + WARM_UP):
            send, out = buffers[number % num_buffers]
            channel.barrier()
            start = time.perf_counter(), time.process_time()
            channel.all_to_all(send, counts, counts, out)
            walls.append(time.perf_counter() - start[0])
            cpus.append(time.process_time() - start[1])
        busy = (_busy_s() - busy) / size / (ROUNDS + WARM_UP)
        wall.append(float(np.median(walls[WARM_UP:])))
        # the kernel's part is not all a process's own; of short messages its clock is too coarse
        own = float(np.median(cpus[WARM_UP:]))
        cpu.append(max(own, busy) if num_bytes >= LARGE_BYTES else own)
    others = size - 1
    moved = others * (MESSAGE_BYTES[-1] - MESSAGE_BYTES[0])
    return Link(
        bytes_per_second=moved / max(1e-9, wall[-1] - wall[0]),
        message_s=wall[0],
        call_cpu_s=cpu[0] / others,
        byte_cpu_s=max(0.0, cpu[-1] - cpu[0]) / (2 * moved),
    )


def _busy_s() -> float:
    """Seconds of CPU that all processes of this machine have used; 0 where it does not say."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split(None, 8)[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _machine(
    samples: Sequence[Sample], answers: Sequence[dict[str, Any]], name: str, process: ProcessBytes
) -> Machine:
    times = [each for answer in answers for each in answer["times"]]
    operations: dict[str, list[PartCost]] = {}
    for operation, number in sorted({key for each in times for key in each}):
        points = [each[operation, number] for each in times if (operation, number) in each]
        operations.setdefault(operation, []).append(_fitted(points))
    dense = {}
    for sample in samples:
        measured = [
            {
                part: float(
                    np.mean([answer["dense"][sample.key, size][part] for answer in answers])
                )
                for part in answers[0]["dense"][sample.key, size]
            }
            for size in sample.batch_sizes
        ]
        dense[sample.key] = _dense_cost(sample.batch_sizes, measured)
    rates = [
        each.flops / sum(call / size + sample for call, sample in each.parts)
        for each, size in ((dense[sample.key], sample.batch_sizes[0]) for sample in samples)
    ]
    return Machine(
        name=name,
        cpu=cpu_model(),
        cores=num_cores(),
        versions=installed_versions(),
        measured_at=datetime.now(UTC).replace(microsecond=0),
        operations=operations,
        dense=dense,
        flops_per_second=float(np.median(rates)),
        jitter=float(
            np.mean([each["jitter"] for answer in answers for each in answer["dense"].values()])
        ),
        network=_mean_link([answer["network"] for answer in answers], WIRE_SHARE, TCP_CONTENTION),
        memory=_mean_link([answer["memory"] for answer in answers]),
        process_bytes=sum(process),
        running_bytes=process.running,
    )


WIRE_SHARE = 1448 / 1514
"""Of a TCP segment's bytes on Ethernet with an MTU of 1500: 66 are headers."""
TCP_CONTENTION = 0.19
"""Of TCP's flows, which share links unevenly: some links idle while others still carry.

Two ranks cannot show it. Fitted to gloo's all-to-all alone, 12 MB a rank at 100 and 200 Mbit/s: of
their lines 4, 8 and 16 hosts used .89, .84 and .81, two all (note 0038).
"""


def _mean_link(links: Sequence[Link], wire_share: float = 1.0, contention: float = 0.0) -> Link:
    names = ("bytes_per_second", "message_s", "call_cpu_s", "byte_cpu_s")
    measured = {each: [getattr(link, each) for link in links] for each in names}
    values = {name: float(np.mean(each)) for name, each in measured.items() if None not in each}
    return Link(**values, wire_share=wire_share, contention=contention)


def _fitted(points: Sequence[tuple[np.ndarray, float]]) -> PartCost:
    """Costs that explain the times with the least relative error, none below zero."""
    about = np.array([[1.0, *features] for features, _ in points])
    seconds = np.array([max(value, 1e-9) for _, value in points])
    # alike columns, as rows and their bytes of one width, share what they explain
    scale = np.maximum(about.max(0), 1e-300)
    found, _ = nnls(about / scale / seconds[:, None], np.ones(len(seconds)))
    costs = found / scale
    return PartCost(call=costs[0], **dict(zip(FEATURES, costs[1:].tolist(), strict=True)))


def _dense_cost(batch_sizes: Sequence[int], measured: Sequence[dict[str, float]]) -> DenseCost:
    def line(part: str) -> tuple[float, float]:
        values = np.array([each[part] for each in measured])
        if not values.all():  # a model without it
            return 0.0, 0.0
        about = np.stack([np.ones(len(values)), np.array(batch_sizes, float)], 1)
        (call, sample), _ = nnls(about / values[:, None], np.ones(len(values)))
        return float(call), float(sample)

    last = measured[0]
    return DenseCost(
        begin=line("begin"),
        forward=line("forward"),
        backward=line("backward"),
        rest=line("rest"),
        optimizer=float(np.mean([each["optimizer"] for each in measured])),
        flops=last["flops"],
        early_bytes=int(last["early_bytes"]),
        late_bytes=int(last["late_bytes"]),
        towers_forward=line("towers_forward"),
        towers_backward=line("towers_backward"),
    )
