"""A contender of several processes: one rank each, on the hosts of a lab, commanded together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.contender import Contender, ContenderSpec, Timing, answers
from benchmarks.lab import Lab, LinkBytes
from benchmarks.load import ForeignLoad


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes that the hosts' links carried in some steps, or in a pause after them: in no steps.

    Attributes:
        steps: how many.
        links: of each host.
        loopback: bytes on each host's loopback interface.
    """

    steps: int
    links: tuple[LinkBytes, ...]
    loopback: tuple[int, ...] = ()


class Team:
    """The ranks of one contender; stands wherever a contender of one process does.

    Attributes:
        spec: what each rank runs.
        members: by rank.
        carried: bytes by turn, the most recent last.
    """

    def __init__(self, spec: ContenderSpec, lab: Lab) -> None:
        self.spec = spec
        self._lab = lab
        self.members: list[Contender] = []
        self.carried: list[Carried] = []
        port = lab.next_port()
        for rank in range(lab.world_size):
            placed = replace(
                spec, launcher=lab.launcher(rank), environment=lab.environment(rank, port)
            )
            self.members.append(Contender(placed))

    def setup(self, case: Case) -> dict[str, str]:
        """See :class:`benchmarks.contender.Competitor`."""
        versions: dict[str, str] = self._ask({"do": "setup", "case": case.as_json()})[0]["versions"]
        return versions

    def check(self, steps: int) -> dict[str, list[float]]:
        """Means over the ranks, which have equally many samples.

        So the losses are those of the global batches.
        """
        values = [answer["values"] for answer in self._ask({"do": "check", "steps": steps})]
        return {
            series: np.mean([value[series] for value in values], axis=0).tolist()
            for series in values[0]
        }

    def run(self, phase: str, first: int, steps: int) -> Timing:
        """A step's times are means over the ranks.

        Ranks wait for each other, so none runs ahead for long.
        """
        with self._counting_bytes(steps):
            timings = self._ask({"do": "run", "phase": phase, "first": first, "steps": steps})
        step_ms = np.mean([timing["step_ms"] for timing in timings], axis=0).tolist()
        reported = [timing["figures"] for timing in timings]
        names = dict.fromkeys(name for each in reported for name in each)
        nothing = [0.0] * steps
        figures = {
            name: np.mean([each.get(name, nothing) for each in reported], axis=0).tolist()
            for name in names
        }
        return Timing(
            step_ms, float(np.mean([timing["cpu_ms_per_step"] for timing in timings])), figures
        )

    def pause(self, seconds: float) -> None:
        """See :class:`benchmarks.contender.Competitor`; what the links carry meanwhile counts."""
        with self._counting_bytes(0):
            time.sleep(seconds)

    def memory(self) -> dict[str, int]:
        """Of the rank that uses most, for each entry."""
        memories = self._ask({"do": "memory"})
        return {name: max(memory[name] for memory in memories) for name in memories[0]}

    def counts(self) -> dict[str, float]:
        """What the ranks counted since the set-up, means over the ranks."""
        counted = [answer["counts"] for answer in self._ask({"do": "count"})]
        names = dict.fromkeys(name for each in counted for name in each)
        return {name: sum(each.get(name, 0) for each in counted) / len(counted) for name in names}

    def count_load(self, load: ForeignLoad) -> None:
        """Count the ranks' work as the measurement's own."""
        for member in self.members:
            load.add_worker(member.pid)

    def kill(self) -> None:
        """End all ranks at once."""
        for member in self.members:
            member.kill()

    def close(self) -> None:
        """End all ranks."""
        for member in self.members:
            member.close()

    @contextmanager
    def _counting_bytes(self, steps: int) -> Iterator[None]:
        network = self._lab.network
        before = network.link_bytes()
        near_before = network.loopback_bytes()
        yield
        after = network.link_bytes()
        near_after = network.loopback_bytes()
        links = tuple(new.since(old) for new, old in zip(after, before, strict=True))
        loopback = tuple(new - old for new, old in zip(near_after, near_before, strict=True))
        self.carried.append(Carried(steps, links, loopback))

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        for member in self.members:
            member.send(command)
        return answers(self.members)


@contextmanager
def teams(specs: tuple[ContenderSpec, ...], lab: Lab) -> Iterator[list[Team]]:
    """Start a team for each spec, end them afterwards.

    After an error they are killed, for ranks may wait for each other.
    """
    running: list[Team] = []
    try:
        for spec in specs:
            running.append(Team(spec, lab))
        yield running
    except BaseException:
        for team in running:
            team.kill()
        raise
    finally:
        for team in running:
            team.close()
