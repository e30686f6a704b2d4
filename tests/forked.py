"""Processes forked from a server that has loaded torch, numba and pibroch: real ones, but without seconds of imports each.

Nothing of the tests' own process is in them, and the server runs no thread but its own. It has trained two steps, too
(:mod:`warm`; where pytest runs in another folder than the repository's it is not found, and everything takes longer).
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self

import torch

HERE = Path(__file__).parent
PRELOADED = [
    "torch.distributed",
    "numba",
    "typer",
    "rich.progress",
    "pibroch.rpc.api",
    "pibroch.train.run",
    "tests.warm",
]
TIMEOUT_S = 120


def context() -> ForkServerContext:
    """For processes that run functions of the tests."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


class Program:
    """What ``subprocess.Popen([sys.executable, *arguments])`` would be. Leaving the ``with`` block kills what still runs.

    What it starts by ``torch.multiprocessing.spawn`` is forked, too. Variables that libraries read while they are loaded,
    such as ``OMP_NUM_THREADS``, come too late here.

    Args:
        arguments: ``-m``, a module and its arguments, or a script and its arguments.
        env: all variables; by default those of the tests.
        cwd: the folder to run in.
    """

    def __init__(self, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory()
        places = [str(Path(self._folder.name) / name) for name in ("stdout", "stderr")]
        for place in places:
            Path(place).touch()
        become = (self.arguments, env or dict(os.environ), str(cwd or Path.cwd()), *places)
        self._process = context().Process(target=_become, args=become)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def end(self, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Wait for its end; returns exit code and output."""
        self._process.join(timeout_s)
        output, errors = (Path(self._folder.name, name).read_text() for name in ("stdout", "stderr"))
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout_s, output, errors)
        return subprocess.CompletedProcess(self.arguments, self.poll(), output, errors)


def _become(arguments: list[str], env: dict[str, str], cwd: str, output: str, errors: str) -> None:
    for descriptor, place in ((1, output), (2, errors)):
        opened = os.open(place, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115, as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ |= env
    os.chdir(cwd)
    sys.path[:] = [place for place in sys.path if place != str(HERE.parent) and HERE not in (Path(place) / "x").parents]
    sys.orig_argv = [sys.executable, *arguments]
    torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, cwd)
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
