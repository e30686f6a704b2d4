"""Servers and processors as processes of this machine, which end with the one that started them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pibroch.errors import TrainingError
from pibroch.roles.registry import BUILT_IN, VARIABLE
from pibroch.roles.role import Role

START_TIMEOUT_S = 120.0
END_S = 5.0
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PIBROCH_LAUNCHER")


@dataclass(frozen=True, slots=True)
class Share:
    """Processes of one role.

    Attributes:
        role: theirs.
        count: how many.
        logs: folder for what they say.
    """

    role: Role
    count: int
    logs: Path


@contextmanager
def started(shares: Sequence[Share], threads: int, meet: str | None = None) -> Iterator[str]:
    """Within, these run on this machine; gives their meeting place. They end with this process, however it ends.

    Args:
        shares: of which roles, and how many.
        threads: of each one's kernels.
        meet: a meeting place that there is already; one is opened in this process when absent.

    Raises:
        TrainingError: when one does not start.
    """
    store = None
    if meet is None:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # here, so that it outlives all of them
        meet = f"tcp://{store.host}:{store.port}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            share.logs.mkdir(parents=True, exist_ok=True)
            processes += [_start(share, number, meet, threads) for number in range(share.count)]
        deadline = time.monotonic() + START_TIMEOUT_S
        members = [(share, number) for share in shares for number in range(share.count)]
        for (share, number), process in zip(members, processes, strict=True):
            _wait_until_ready(share, number, process, deadline)
        yield meet
    finally:
        _end(processes)
        del store


def _log(share: Share, number: int) -> Path:
    return share.logs / f"{number}.log"


def _start(share: Share, number: int, meet: str, threads: int) -> subprocess.Popen[bytes]:
    """Its standard input is a pipe from here: when that ends, with this process or before, so does the other one."""
    command = [sys.executable, "-m", "pibroch", share.role.command, "--meet", meet, "--number", str(number)]
    command += ["--threads", str(threads), "--until-input-ends"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    if share.role not in BUILT_IN and VARIABLE not in environment:  # nobody need have installed it
        places = os.pathsep.join(place for place in sys.path if place)
        environment |= {VARIABLE: share.role.functions, "PYTHONPATH": places}
    with _log(share, number).open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environment, start_new_session=True
        )


def _wait_until_ready(share: Share, number: int, process: subprocess.Popen[bytes], deadline: float) -> None:
    """It says a line when it is ready."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready or not process.stdout.readline():
        how = "ended" if ready else f"was not ready within {START_TIMEOUT_S:g} s"
        title = share.role.title
        raise TrainingError(f"{title} {number}, which {how}", f"all {title}s", f"see {_log(share, number)}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
