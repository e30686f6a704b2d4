"""A question about a recipe, and its answer for each number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pibroch.errors import ConfigError
from pibroch.exchange.layout import lay_out
from pibroch.exchange.raw_ids import learns
from pibroch.observability.memory import free_memory
from pibroch.sim.chakra import write_traces
from pibroch.sim.cluster import Cluster, bytes_per_second
from pibroch.sim.counting import Job, StepCount, count
from pibroch.sim.economy import Economy, saved_by
from pibroch.sim.machine import Machine
from pibroch.sim.mirrored import EXACT_RANKS, count_few
from pibroch.sim.prediction import Conditions, Prediction, predict
from pibroch.sim.recipe import ModelBytes, Workload
from pibroch.sim.sampled import count_sampled_lookahead
from pibroch.sim.sensitivity import sensitivity
from pibroch.sim.steps import Dense

COUNTED_STEPS = 4
STEPS_OF_MANY = 2
"""Of more ranks than EXACT_RANKS."""
MOST_RANKS = {"alltoall": EXACT_RANKS, "lookahead": EXACT_RANKS, "towers": 512}
"""That are counted one by one; under the first two a few stand for more."""


@dataclass(frozen=True, slots=True)
class Question:
    """All of a cluster but its number of hosts; see ``pibroch simulate --help``.

    Attributes:
        machine: what things take.
        ranks_per_host: of each host.
        link: rate of each host's link.
        local: name or rate of the link within a host.
        samples: of a rank's batch.
        utilisation: share of a device's rate that dense layers reach.
        jitter: spread of the times of work; the machine's where absent.
        hosts_per_machine: hosts that share cores.
        link_burst: bytes, see :class:`~pibroch.sim.cluster.Cluster`.
        seed: of samples and jitter.
        economy: deaths and prices.
        notes: on the machine, see :func:`pibroch.sim.provenance.notes_on`.
    """

    machine: Machine
    ranks_per_host: int
    link: str
    local: str | None
    samples: int
    utilisation: float = 1.0
    jitter: float | None = None
    hosts_per_machine: int = 1
    link_burst: float = 0.0
    seed: int = 0
    economy: Economy = field(default_factory=Economy)
    notes: Sequence[str] = ()

    def check(self) -> None:
        """Raise ConfigError for links that cannot be."""
        self.cluster(1)

    def cluster(self, num_hosts: int) -> Cluster:
        """So many of these hosts."""
        return Cluster(
            num_hosts,
            self.ranks_per_host,
            bytes_per_second(self.link),
            self._local_rate(),
            float(self.machine.cores),
            self.hosts_per_machine,
            self.link_burst,
        )

    def _local_rate(self) -> float:
        links = self.machine.links
        if self.local in links:
            return links[self.local]
        if self.local is not None:
            if not self.local[:1].isdigit():
                raise ConfigError(
                    f"--local {self.local}",
                    f"a rate, or one of {', '.join(links)}" if links else "a rate, e.g. 300gbit",
                    f"calibration {self.machine.name!r} knows no other",
                )
            return bytes_per_second(self.local)
        return self.machine.memory.bytes_per_second or next(iter(links.values()), 1e9)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is predicted for a number of hosts.

    Attributes:
        hosts, ranks: how many.
        exchange: that they use.
        prediction: of a step.
        helped_s: a step's time if one thing were twice as fast, or as many, by its name.
        goodput: share of the time in which new steps are made, where ranks die.
        price: of a billion new samples; ``None`` where it is not asked.
        memory_bytes: of each rank's process, by what takes it; the rank that takes most.
        sampling_error: relative standard error of bytes where ranks or rows were sampled.
        notes: what a reader should know.
    """

    hosts: int
    ranks: int
    exchange: str
    prediction: Prediction
    helped_s: dict[str, float]
    goodput: float
    price: float | None
    memory_bytes: dict[str, float]
    sampling_error: float
    notes: Sequence[str]

    def content(self) -> dict[str, Any]:
        """Plain values."""
        told = self.prediction
        return {
            "hosts": self.hosts,
            "ranks": self.ranks,
            "exchange": self.exchange,
            "step_seconds": told.step_s,
            "samples_per_second": told.samples_per_second,
            "goodput": self.goodput,
            "price_of_a_billion_samples": self.price,
            "parts_seconds": told.parts_s,
            "waiting_seconds": told.waiting_s,
            "step_seconds_with_twice": self.helped_s,
            "sent_bytes_per_rank": float(told.sent_bytes.mean()),
            "sent_bytes_worst_rank": float(told.sent_bytes.max()),
            "link_bytes_per_host": float(told.link_bytes.mean()),
            "link_bytes_worst_host": float(told.link_bytes.max()),
            "memory_bytes": self.memory_bytes,
            "sampling_error": self.sampling_error,
            "notes": list(self.notes),
        }


def answer(
    workload: Workload, question: Question, num_hosts: int, traces: Path | None = None
) -> Answer:
    """Count steps of so many hosts, and predict what they take.

    Args:
        workload: what they train.
        question: of which machines they are.
        num_hosts: how many.
        traces: a folder for traces of the steps, see :func:`~pibroch.sim.chakra.write_traces`.

    Raises:
        ConfigError: for what cannot be, or is not simulated.
    """
    cluster = question.cluster(num_hosts)
    size = cluster.num_ranks
    per_host = question.ranks_per_host
    exchange = workload.exchange(size, per_host)
    job = workload.job(size, question.samples, ranks_per_host=per_host)
    towers = workload.towers(size, per_host)
    notes = []
    error = 0.0
    if size > EXACT_RANKS:
        _check_alike(job)
    if exchange == "alltoall" and size > EXACT_RANKS:
        counts, error = count_few(job, per_host, STEPS_OF_MANY)
        notes.append(
            f"{size:,} ranks: a few are looked at, so bytes have a standard error of {error:.1%}"
        )
    elif exchange == "lookahead" and size > EXACT_RANKS:
        counts, error = count_sampled_lookahead(job, per_host, COUNTED_STEPS, question.seed)
        notes.append(
            f"{size:,} ranks: one is looked at, by a sample of rows, so bytes have a standard error"
            f" of {error:.1%}"
        )
    else:
        most = MOST_RANKS.get(exchange, EXACT_RANKS)
        if size > most:
            raise ConfigError(
                f"{size:,} ranks under {exchange}",
                f"at most {most}, which are counted one by one, or alltoall",
                "lower --hosts, or pass --set embedding.exchange=alltoall",
            )
        num_steps = COUNTED_STEPS if size <= EXACT_RANKS else STEPS_OF_MANY
        if isinstance(job.exchange, str) or is_compressed(job):
            job = with_rows(job)
        counts = count(job, num_steps)
        unknown = {
            each.name
            for step in counts
            for each in step.operations
            if not question.machine.knows(each)
        }
        if unknown and not job.has_numbers:
            counts = count(with_rows(job), num_steps)
        if is_compressed(job):
            notes.append("the time that compression takes was measured here")
        if unknown:
            notes.append(
                f"{', '.join(sorted(unknown))}: {question.machine.name} does not know what they"
                " take, so they were timed here"
            )
    cost, note = workload.dense_cost(question.machine, question.utilisation)
    dense = Dense(cost, question.samples, towers)
    conditions = Conditions(cluster, question.machine, dense, question.jitter, question.seed)
    prediction = predict(counts, conditions)
    helped = sensitivity(counts, conditions)
    if traces is not None:
        write_traces(conditions.program(counts), traces)
    notes += [*([note] if note else []), *question.notes]
    model = workload.model_bytes(question.samples)
    memory = memory_of(job, counts, dense, model, question.machine.process_bytes)
    economy = question.economy
    goodput = 1.0
    if economy.death_every_h is not None:
        goodput = economy.goodput(size, saved_by(workload.config.train, economy.saving_s))
    price = economy.price_of_a_billion(num_hosts, goodput * prediction.samples_per_second)
    return Answer(
        num_hosts, size, exchange, prediction, helped, goodput, price, memory, error, notes
    )


def _check_alike(job: Job) -> None:
    """Refuse what ranks must be counted one by one for, of which a few cannot stand for all.

    Raises:
        ConfigError: for compressed messages, assigned samples and raw ids.
    """
    unlike = {
        "compressed messages": is_compressed(job),
        "samples that are assigned by rows": job.loader_of is not None,
        "tables of raw ids": learns(job.groups),
    }
    for what, is_there in unlike.items():
        if is_there:
            raise ConfigError(
                f"{job.num_ranks:,} ranks with {what}",
                f"at most {EXACT_RANKS}, which are counted one by one",
                "lower --hosts, or leave that out",
            )


def with_rows(job: Job) -> Job:
    """The same job with numbers in its rows, where bytes or times follow from these.

    Raises:
        ConfigError: for more rows than half of the free memory here has room for.
    """
    num_bytes = sum(
        4 * each.optimizer.record_width(layout.width, layout.dtype) * int(layout.bounds[-1])
        for each in job.groups
        for layout in lay_out(each.space, job.plan, 0)
    )
    if num_bytes > free_memory() / 2:
        raise ConfigError(
            f"{num_bytes / 1e9:,.1f} GB of rows where {free_memory() / 1e9:,.1f} GB are free:"
            " what they hold, or what is done with them, decides about bytes and times",
            "rows that fit, an exchange that the calibration knows, and messages as they are",
            "leave compress out, or simulate a part of the tables",
        )
    return replace(job, seed=0)


def is_compressed(job: Job) -> bool:
    """Whether messages are smaller for what is in them."""
    return bool(job.options.get("compress", getattr(job.exchange, "compress", False)))


def memory_of(
    job: Job, counts: Sequence[StepCount], dense: Dense, model: ModelBytes, process_bytes: float
) -> dict[str, float]:
    """Bytes of the rank that takes most, by what takes them, at the peak of a step."""
    rows = np.zeros(job.num_ranks)
    record = 0
    for group in job.groups:
        for layout in lay_out(group.space, job.plan, 0):
            record = 4 * group.optimizer.record_width(layout.width, layout.dtype)
            rows += np.diff(layout.bounds) * record
    slots = [each.num_slots for each in counts if each.num_slots is not None]
    held = {name: max(float(each.held[name].max()) for each in counts) for name in counts[0].held}
    return {
        "process": process_bytes,
        "rows": float(rows.max()),
        "slots": float(np.max(slots)) * record if slots else 0.0,
        **held,
        "dense": dense.parameter_bytes * model.copies,
        "activations": model.activations,
    }
