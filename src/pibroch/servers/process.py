"""Servers as processes of this machine, which end with the one that started them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pibroch.errors import TrainingError

START_TIMEOUT_S = 120.0
END_S = 5.0
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PIBROCH_LAUNCHER")


@contextmanager
def started(num_servers: int, logs: Path, threads: int) -> Iterator[str]:
    """Within, servers run on this machine; gives their meeting place. They end with this process, however it ends.

    Args:
        num_servers: how many.
        logs: folder for what they say.
        threads: of each one's kernels.

    Raises:
        TrainingError: when one does not start.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # here, so that it outlives any server
    meet = f"tcp://{store.host}:{store.port}"
    logs.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(num_servers):
            processes.append(_start(meet, number, logs / f"{number}.log", threads))
        deadline = time.monotonic() + START_TIMEOUT_S
        for number, process in enumerate(processes):
            _wait_until_ready(number, process, logs / f"{number}.log", deadline)
        yield meet
    finally:
        _end(processes)
        del store


def _start(meet: str, number: int, log: Path, threads: int) -> subprocess.Popen[bytes]:
    """Its standard input is a pipe from here: when that ends, with this process or before, so does the server."""
    command = [sys.executable, "-m", "pibroch", "embedding-server", "--meet", meet, "--number", str(number)]
    command += ["--threads", str(threads), "--until-input-ends"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environment, start_new_session=True
        )


def _wait_until_ready(number: int, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """A server says a line when it is ready."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready or not process.stdout.readline():
        how = "ended" if ready else f"was not ready within {START_TIMEOUT_S:g} s"
        raise TrainingError(f"embedding server {number}, which {how}", "all servers", f"see {log}")


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
