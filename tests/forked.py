"""Processes forked from a server that has loaded torch, numba and pibroch.

Real ones, but without seconds of imports each.

Nothing of the tests' own process is in them, and the server runs no thread but its own. It has
trained two steps, too (:mod:`warm`; where pytest runs in another folder than the repository's it is
not found, and everything takes longer).
"""

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import torch

from pibroch.launch import machines
from pibroch.ports import free_port

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
PR_SET_NAME = 15


def context() -> ForkServerContext:
    """For processes that run functions of the tests."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


class Program:
    """What ``subprocess.Popen([sys.executable, *arguments])`` would be.

    Leaving the ``with`` block kills what still runs.

    What it starts by ``torch.multiprocessing.spawn``, and pibroch's ranks, servers and processors
    (:class:`Child`), are forked, too. What torchrun starts is not: it has threads by then, that of
    its store among them. Variables that libraries read while they are loaded, such as
    ``OMP_NUM_THREADS``, come too late here.

    Args:
        arguments: ``-m``, a module and its arguments, or a script and its arguments.
        env: all variables; by default those of the tests.
        cwd: the folder to run in.
        leads_session: whether it is the first process of a session of its own.
    """

    def __init__(
        self,
        *arguments: object,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        leads_session: bool = False,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory()
        places = [str(Path(self._folder.name) / name) for name in ("stdout", "stderr")]
        for place in places:
            Path(place).touch()
        become = (
            self.arguments,
            env or dict(os.environ),
            str(cwd or Path.cwd()),
            *places,
            leads_session,
        )
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
        output, errors = (
            Path(self._folder.name, name).read_text() for name in ("stdout", "stderr")
        )
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout_s, output, errors)
        return subprocess.CompletedProcess(self.arguments, self.poll(), output, errors)


@contextmanager
def ranks(size: int, *arguments: object, **options: Path) -> Iterator[list[Program]]:
    """A program as each of ``size`` ranks, with the variables that torchrun sets.

    What torchrun itself does is the matter of ``test_launch.py``: it loads everything anew, in each
    rank.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Program(
                    *arguments,
                    env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    **options,
                )
            )
            for rank in range(size)
        ]


def _become(
    arguments: list[str],
    env: dict[str, str],
    cwd: str,
    output: str,
    errors: str,
    leads_session: bool,
) -> None:
    if leads_session:
        os.setsid()
    for descriptor, place in ((1, output), (2, errors)):
        opened = os.open(place, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    sys.path[:] = [
        place
        for place in sys.path
        if place != str(HERE.parent) and HERE not in (Path(place) / "x").parents
    ]
    fork_children()
    try:
        _run(arguments, env)
    finally:
        atexit._run_exitfuncs()


def fork_children(setattr: Callable[[object, str, object], None] = setattr) -> None:
    """Have what this process starts (see :class:`Program`) be forked from it."""
    spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    setattr(torch.multiprocessing, "spawn", spawn)
    setattr(machines, "subprocess", SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL))


def _run(arguments: list[str], env: dict[str, str]) -> None:
    """What ``python`` does with its arguments."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115, as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ |= env
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class Child:
    """What ``subprocess.Popen`` would be to who starts a program in Python.

    Forked from who starts it.

    Like a started process it has no other descriptors than its standard ones. ``/proc`` shows it by
    a name (:func:`title`).
    """

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert args[0] == sys.executable
        descriptors: dict[int, int] = (
            {0: os.open(os.devnull, os.O_RDONLY)} if stdin == subprocess.DEVNULL else {}
        )
        copies = list(descriptors.values())
        descriptors |= {} if stdout is None else {1: stdout}
        descriptors |= {} if stderr is None else {2: stderr}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._status = None
        if self.pid == 0:
            _be_child(
                [each for each in args[1:] if each != "-u"], env, descriptors, start_new_session
            )
        for descriptor in copies:
            os.close(descriptor)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _popen(*args: object, **options: object) -> object:
    """A fork of a thread beside the main one might never get the locks that others hold."""
    is_main = threading.current_thread() is threading.main_thread()
    return Child(*args, **options) if is_main else subprocess.Popen(*args, **options)


def title(env: dict[str, str], arguments: list[str]) -> str:
    """The name of a child: its rank, or its command and number; 15 letters at most."""
    if "--number" in arguments:
        return f"{arguments[2]:.12} {arguments[arguments.index('--number') + 1]}"
    return f"rank {env.get('RANK')}"


def _be_child(
    arguments: list[str], env: dict[str, str], descriptors: dict[int, int], leads_session: bool
) -> None:
    code = 1
    try:
        if leads_session:
            os.setsid()
        for number, descriptor in descriptors.items():
            os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        ctypes.CDLL(None).prctl(PR_SET_NAME, title(env, arguments).encode(), 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name in [name for name in sys.modules if name.startswith("pibroch.cli")]:
            del sys.modules[name]
        _run(arguments, env)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)
