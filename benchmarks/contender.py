"""The driver's half of the protocol: one process per contender, in the environment that has what it needs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.cases import Case
from pibroch.errors import PibrochError

CHECKOUT = Path(__file__).resolve().parent.parent
ANSWER_TIMEOUT_S = 300.0  # the longest command, a set-up of large tables, takes a tenth of it
QUIT_TIMEOUT_S = 20.0


class BenchmarkError(PibrochError):
    """A measurement that could not be made or must not be reported."""


@dataclass(frozen=True, slots=True)
class ContenderSpec:
    """Who measures: ``label`` in tables, ``worker`` module under ``benchmarks/workers``, ``python`` to run it."""

    label: str
    worker: str
    python: Path


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall milliseconds of each step; CPU milliseconds of all threads together, a step on average."""

    step_ms: list[float]
    cpu_ms_per_step: float


class Contender:
    """A running worker. Use as a context manager; leaving it ends the process."""

    def __init__(self, spec: ContenderSpec) -> None:
        self.spec = spec
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the worker
        environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [str(spec.python), "-m", "benchmarks.workers", spec.worker],
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
        """Build the case; returns the versions that matter."""
        versions: dict[str, str] = self._ask({"do": "setup", "case": case.as_json()})["versions"]
        return versions

    def check(self, steps: int) -> dict[str, list[float]]:
        """Series that must agree between contenders."""
        values: dict[str, list[float]] = self._ask({"do": "check", "steps": steps})["values"]
        return values

    def run(self, phase: str, first: int, steps: int) -> Timing:
        """Time ``steps`` steps from batch ``first`` on."""
        return Timing(**self._ask({"do": "run", "phase": phase, "first": first, "steps": steps}))

    def memory(self) -> dict[str, int]:
        """Resident bytes: ``baseline`` before the set-up, ``peak`` since the set-up or the last check, ``now``."""
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

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if not self._ready:
            self._answer()
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("the worker ended") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + ANSWER_TIMEOUT_S
        while b"\n" not in self._pending:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(descriptor, 65536) if readable else b""
            if not chunk:
                raise self._failure("no answer in time" if not readable else "the worker ended")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _failure(self, reason: str) -> BenchmarkError:
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace")[-2000:]
        command = f"{self.spec.python} -m benchmarks.workers {self.spec.worker}"
        return BenchmarkError(
            f"{self.spec.label} failed: {reason.strip()}\n{tail}".strip(),
            "a contender that answers",
            f"start it alone to see why: {command}",
        )
