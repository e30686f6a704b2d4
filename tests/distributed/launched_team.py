"""`pibroch train --ranks` as its own processes, which tests find, kill and count."""

import os
import signal
import subprocess
import time
from pathlib import Path

from forked import Program

TIMEOUT_S = 240
POLL_S = 0.005
STILL_S = 1.0  # a hundred steps


class Forked:
    """As far as it is needed here, what ``subprocess.Popen`` of the launcher would be."""

    def __init__(self, *arguments):
        self._program = Program("-m", "pibroch", *arguments, leads_session=True)
        self.pid = self._program.pid
        self.poll = self._program.poll
        self.close = self._program.__exit__

    @property
    def returncode(self):
        return self.poll()

    def communicate(self, timeout):
        ended = self._program.end(timeout)
        return ended.stdout + ended.stderr, None


class Team:
    """A launcher and its ranks. Leaving the ``with`` block kills what is left of them.

    Args:
        arguments: of the command; without ``--restarts`` nothing is started again.
        command: of pibroch.
        program: to be started in place of the launcher, which otherwise is forked, and forks its
            ranks.

    Attributes:
        process: the launcher; its output is in ``output`` once it has ended.
    """

    def __init__(self, *arguments, program=None, command="train"):
        if command == "train" and "--restarts" not in arguments:
            arguments = *arguments, "--restarts", 0
        self.process = (
            Forked(command, *arguments)
            if program is None
            else subprocess.Popen(
                [*program, command, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        self.output = ""
        self._pids = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pids()
        launchers = [self.process.pid] if self.process.poll() is None else []
        for pid in [*launchers, *self._pids.values()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate(timeout=TIMEOUT_S)
        if isinstance(self.process, Forked):
            self.process.close()

    def pids(self):
        """Living processes by rank."""
        results = {}
        for folder in Path("/proc").iterdir():
            try:
                if not folder.name.isdigit() or _parent(folder) != self.process.pid:
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
                name = (folder / "comm").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            ranks = [int(variable[5:]) for variable in variables if variable.startswith(b"RANK=")]
            ranks += [int(name[5:])] if name.startswith("rank ") else []
            results |= {rank: int(folder.name) for rank in ranks}
        self._pids |= results
        return results

    def wait_for_step(self, run, step):
        """Wait until rank 0 reports a step; returns the processes by rank."""
        wait_until(lambda: steps(run) >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate(timeout=TIMEOUT_S)[0]
        return self.pids()

    def end(self, timeout_s=TIMEOUT_S):
        """Wait for the launcher; returns its exit code."""
        self.output = self.process.communicate(timeout=timeout_s)[0]
        return self.process.returncode

    def is_gone(self):
        """Whether no rank that was ever seen still runs."""
        return not any(lives(pid) for pid in self._pids.values())


def steps(run):
    """Steps that rank 0 has reported."""
    path = run / "metrics.jsonl"
    return path.read_text().count('"kind": "training"') if path.exists() else 0


def stands_still(run):
    """Whether no step comes to its end for a while."""
    before = steps(run)
    time.sleep(STILL_S)
    return steps(run) == before


def processes_of(process_id, command):
    """What a process has started by a command of pibroch's, by number.

    What it asked a fork server for is forked from that.
    """
    results = {}
    parents = (process_id, _parent(Path(f"/proc/{process_id}")))
    for folder in Path("/proc").iterdir():
        try:
            name, _, number = (folder / "comm").read_text().strip().rpartition(" ")
            parent = _parent(folder)
            words = (folder / "cmdline").read_text().split("\0")
            if command in words and "--number" in words:  # not forked
                name = command
                number = words[words.index("--number") + 1]
        except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
            continue
        if name and command.startswith(name) and parent in parents:
            results[int(number)] = int(folder.name)
    return results


def lives(pid):
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, timeout_s=TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(POLL_S)


def _parent(folder):
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
