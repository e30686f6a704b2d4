"""A contender of a caller and its callees, one as a rule, on one host or on those of a lab.

Only the caller is timed.

A pair is stopped (SIGSTOP) while it is not its turn: torch's idle agents poll without end, and two
pairs keep two cores busy.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.cases import Case
from benchmarks.contender import Contender, ContenderSpec, Timing, answers
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad, cpu_s
from pibroch.ports import free_port

SPIN_LITTLE = {"GOMP_SPINCOUNT": "1000"}
"""For all alike.

Else torch's idle threads spin for milliseconds on the cores that the other process wants. How long
depends on how many threads a process happens to have, so that contenders' *local* steps differed
tenfold on a busy machine.
"""


class Pair:
    """A contender's callees and, of the last rank, its caller.

    Stands wherever a contender of one process does.
    """

    def __init__(self, spec: ContenderSpec, lab: Lab | None, num_processes: int = 2) -> None:
        self.spec = spec
        port = lab.next_port() if lab else free_port()
        common = {
            "WORLD_SIZE": str(num_processes),
            "PIBROCH_RPC_SECRET": secrets.token_hex(),
            **SPIN_LITTLE,
        }
        self.members: list[Contender] = []
        for rank in range(num_processes):
            place = lab.environment(rank, port) if lab else local_environment(rank, port)
            launcher = lab.launcher(rank) if lab else ()
            self.members.append(
                Contender(
                    replace(spec, launcher=launcher, environment=spec.environment | place | common)
                )
            )
        *self._callees, self._caller = self.members

    def setup(self, case: Case) -> dict[str, str]:
        """See :class:`benchmarks.contender.Competitor`; all join each other."""
        with self._awake():
            for member in self.members:
                member.send({"do": "setup", "case": case.as_json()})
            versions: dict[str, str] = answers(self.members)[0]["versions"]
        return versions

    def check(self, steps: int) -> dict[str, list[float]]:
        """Fails when a result of the first sizes is not the one computed locally.

        Without ``steps``: parts of timed steps.
        """
        values: dict[str, list[float]] = self._ask({"do": "check", "steps": steps})["values"]
        return values

    def run(self, phase: str, first: int, steps: int) -> Timing:
        """Times as the caller sees them, CPU time of all processes."""
        before = self._callees_cpu_ms()
        timing = Timing(**self._ask({"do": "run", "phase": phase, "first": first, "steps": steps}))
        callees_ms = (self._callees_cpu_ms() - before) / steps
        return replace(timing, cpu_ms_per_step=timing.cpu_ms_per_step + callees_ms)

    def idle(self, seconds: float) -> float:
        """CPU time of all processes, in milliseconds a second, while nothing is asked of them."""
        with self._awake():
            before = cpu_s(member.pid for member in self.members)
            time.sleep(seconds)
            used = cpu_s(member.pid for member in self.members) - before
            return 1e3 * used / seconds

    def pause(self, seconds: float) -> None:
        """See :class:`benchmarks.contender.Competitor`."""
        time.sleep(seconds)

    def memory(self) -> dict[str, int]:
        """Of the caller."""
        return self._ask({"do": "memory"})

    def close(self) -> None:
        """End all at once: none waits for another."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.close()

    def _callees_cpu_ms(self) -> float:
        return 1e3 * cpu_s(member.pid for member in self._callees)

    def _ask(self, command: dict[str, Any]) -> Any:
        with self._awake():
            self._caller.send(command)
            return answers([self._caller])[0]

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for member in self.members:
            os.kill(member.pid, number)


def local_environment(rank: int, port: int) -> dict[str, str]:
    """Where the two processes of one host meet."""
    return {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def pairs(
    chosen: Sequence[ContenderSpec], lab: Lab | None, load: ForeignLoad, num_processes: int = 2
) -> Iterator[list[Pair]]:
    """Start the processes of each spec, end them afterwards."""
    with ExitStack() as stack:
        running = []
        for spec in chosen:
            running.append(Pair(spec, lab, num_processes))
            stack.callback(running[-1].close)
            for member in running[-1].members:
                load.add_worker(member.pid)
        yield running
