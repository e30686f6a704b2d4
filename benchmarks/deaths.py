"""A training run whose processes are killed by role, and whose steps are watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.load import cpu_s

TIMEOUT_S = 600.0
_POLL_S = 0.01
VICTIMS = {
    "trainer": ("", 1),
    "embedding server": ("embedding-server", 0),
    "oracle": ("oracle", 0),
    "data processor": ("data-processor", 0),
}
"""By role: the command of its processes, and which of them dies."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a death cost.

    Attributes:
        seconds: to the end of the first step that no life before had reached.
        steps_again: that were trained a second time.
    """

    seconds: float
    steps_again: int


class WatchedRun:
    """A run in a folder, with processes of its own. Leaving the ``with`` block kills them.

    Args:
        folder: of the run, with the files of a run of pibroch's.
        command: that starts it.
        goes_on_by_itself: whether somebody watches over it; else the command is given again, with
            ``--resume``, when it ends.
        environment: for it, besides.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        goes_on_by_itself: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._command = list(command)
        self._goes_on_by_itself = goes_on_by_itself
        self._environment = os.environ | dict(environment or {})
        self._losses: dict[int, float] = {}
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until something is so.

        Raises:
            TimeoutError: when it is not in time, or the run has ended meanwhile.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError(
                    f"the run in {self.folder} stands still or has ended; see log.txt beside it"
                )
            time.sleep(_POLL_S)

    def step(self) -> int:
        """The last one that was reported.

        Each step's loss must be the one that it had when it was trained before.
        """
        path = self.folder / "metrics.jsonl"
        last = 0
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(json.JSONDecodeError):
                record = json.loads(line)
                if record["kind"] == "training":
                    last = record["step"]
                    if self._losses.setdefault(last, record["loss"]) != record["loss"]:
                        raise AssertionError(
                            f"step {last} has loss {record['loss']}, and had {self._losses[last]}"
                        )
        return last

    def rate(self, seconds: float) -> float:
        """Steps a second, over so many seconds."""
        begin = self.step()
        start = time.monotonic()
        time.sleep(seconds)
        return (self.step() - begin) / (time.monotonic() - start)

    def cpu_s(self) -> float:
        """CPU seconds of its processes that live, so far."""
        pids = [self._process.pid]
        for pid in pids:
            pids += _children(pid)
        return cpu_s(pids)

    def saved_step(self) -> int:
        """Of the newest checkpoint."""
        names = [
            path.name
            for place in ("checkpoints", "recovery")
            for path in (self.folder / place).glob("step-*")
        ]
        return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)

    def lose(self, role: str) -> Recovery:
        """Kill a process of a role, and see the run go on."""
        num_restarts = self._num_restarts()
        victim = self._find(*VICTIMS[role])
        start = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        if not self._goes_on_by_itself:
            self._process.wait(TIMEOUT_S)
            highest = self._highest()
            from_step = self.saved_step()
            self._process = self._start("--resume")
        else:
            self.wait_for(lambda: self._num_restarts() > num_restarts)
            lines = (self.folder / "restarts.jsonl").read_text().splitlines()
            highest = self._highest()
            from_step = json.loads(lines[-1])["from_step"]
        self.wait_for(lambda: self.step() > highest)
        return Recovery(
            time.monotonic() - start, 0 if from_step is None else max(0, highest - from_step)
        )

    def _highest(self) -> int:
        """The last step that any life has reached.

        Steps that were under way at a death count, for they ended, too.
        """
        self.step()
        return max(self._losses, default=0)

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [*self._command, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )

    def _num_restarts(self) -> int:
        path = self.folder / "restarts.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _find(self, command: str, number: int) -> int:
        """By the name under which the system shows it."""
        wanted = f"{command:.12} {number}" if command else f"rank {number}"
        for pid in _children(self._process.pid):
            if Path(f"/proc/{pid}/comm").read_text().strip() == wanted:
                return pid
        raise LookupError(f"no {wanted} in {self.folder}")


def _children(parent: int) -> list[int]:
    results = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                results.append(int(stat.parent.name))
    return results
