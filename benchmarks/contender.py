"""The driver's half of the protocol.

A process that measures, in the environment that has what it needs.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.cases import Case
from pibroch.errors import PibrochError

CHECKOUT = Path(__file__).resolve().parent.parent
ANSWER_TIMEOUT_S = 300.0  # the longest command, a set-up of large tables, takes a tenth of it
QUIT_TIMEOUT_S = 20.0


class BenchmarkError(PibrochError):
    """A measurement that could not be made or must not be reported."""


@dataclass(frozen=True, slots=True)
class ContenderSpec:
    """Who measures.

    Attributes:
        label: in tables.
        worker: module under ``benchmarks/workers``.
        python: to run it.
        launcher: command to put before, e.g. to run it on another host.
        environment: variables to add.
    """

    label: str
    worker: str
    python: Path
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall milliseconds of each step, and mean CPU milliseconds of all threads a step.

    ``figures`` has further times of each step by name.
    """

    step_ms: list[float]
    cpu_ms_per_step: float
    figures: dict[str, list[float]] = field(default_factory=dict)


class Competitor(Protocol):
    """What can be compared: a contender of one process, or a team of ranks."""

    spec: ContenderSpec

    def setup(self, case: Case) -> dict[str, str]:
        """Build the case; returns the versions that matter."""

    def check(self, steps: int) -> dict[str, list[float]]:
        """Series that must agree between contenders."""

    def run(self, phase: str, first: int, steps: int) -> Timing:
        """Time ``steps`` steps from batch ``first`` on."""

    def pause(self, seconds: float) -> None:
        """Wait, so that what goes on beside the steps can end."""

    def memory(self) -> dict[str, int]:
        """Resident bytes: ``baseline``, ``peak`` and ``now``.

        The first is that before the set-up, the second the most since the set-up or the last check.
        """


class Contender:
    """A running worker. Use as a context manager; leaving it ends the process."""

    def __init__(self, spec: ContenderSpec) -> None:
        self.spec = spec
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the worker
        environment = (
            os.environ
            | {
                "PYTHONPATH": f"{CHECKOUT / 'src'}{os.pathsep}{CHECKOUT}",
                "PYTHONWARNINGS": "ignore",
            }
            | spec.environment
        )
        self._process = subprocess.Popen(
            [*spec.launcher, str(spec.python), "-m", "benchmarks.workers", spec.worker],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        self._pending = b""
        self._ready = False

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def setup(self, case: Case) -> dict[str, str]:
        """See :class:`Competitor`."""
        versions: dict[str, str] = self._ask({"do": "setup", "case": case.as_json()})["versions"]
        return versions

    def check(self, steps: int) -> dict[str, list[float]]:
        """See :class:`Competitor`."""
        values: dict[str, list[float]] = self._ask({"do": "check", "steps": steps})["values"]
        return values

    def run(self, phase: str, first: int, steps: int) -> Timing:
        """See :class:`Competitor`."""
        return Timing(**self._ask({"do": "run", "phase": phase, "first": first, "steps": steps}))

    def pause(self, seconds: float) -> None:
        """See :class:`Competitor`."""
        time.sleep(seconds)

    def memory(self) -> dict[str, int]:
        """See :class:`Competitor`."""
        return self._ask({"do": "memory"})

    def close(self) -> None:
        """End the process; one that does not go is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # of a worker that has died, with a command still unsent
            self._process.stdin.close()
        try:
            self._process.wait(QUIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def send(self, command: dict[str, Any]) -> None:
        """Start a command; its answer is then read by :func:`answers`."""
        if not self._ready:
            answers([self])
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self.failure("the worker ended") from error

    def read(self) -> dict[str, Any] | None:
        """Read what has come; the answer when it is complete. Blocks when nothing has come.

        Raises:
            BenchmarkError: when the worker failed or ended.
        """
        chunk = os.read(self.fileno(), 65536)
        if not chunk:
            raise self.failure("the worker ended")
        self._pending += chunk
        if b"\n" not in self._pending:
            return None
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.failure(answer["error"])
        return answer

    def fileno(self) -> int:
        """The descriptor that answers come from."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self.send(command)
        return answers([self])[0]

    def failure(self, reason: str) -> BenchmarkError:
        """The error to raise, with the end of what the worker said on standard error."""
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace")[-2000:]
        command = f"{self.spec.python} -m benchmarks.workers {self.spec.worker}"
        return BenchmarkError(
            f"{self.spec.label} failed: {reason.strip()}\n{tail}".strip(),
            "a contender that answers",
            f"start it alone to see why: {command}",
        )


def answers(
    contenders: Sequence[Contender], timeout_s: float = ANSWER_TIMEOUT_S
) -> list[dict[str, Any]]:
    """Wait for an answer from each, in whatever order they come; the first failure ends the wait.

    Raises:
        BenchmarkError: when one failed, ended, or gave no answer in time.
    """
    deadline = time.monotonic() + timeout_s
    got: dict[Contender, dict[str, Any]] = {}
    while waiting := [contender for contender in contenders if contender not in got]:
        readable, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise waiting[0].failure("no answer in time")
        for contender in readable:
            answer = contender.read()
            if answer is not None:
                got[contender] = answer
    return [got[contender] for contender in contenders]
