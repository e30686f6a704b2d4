"""The side that was forked.

It asks the server for other processes, and for memory that outlives this one.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pibroch.errors import ProtocolError
from pibroch.forkserver.messages import (
    Answer,
    ExitState,
    Keep,
    KeptDescriptor,
    Loaded,
    Request,
    Signal,
    Started,
    StartProcess,
    receive_answer,
    send,
)

logger = logging.getLogger(__name__)
_POLL_S = 0.01
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that stays when this process ends.

    Attributes:
        memory: to read and to write.
        is_new: whether it was made just now, of zeros.
        tag: what it is for.
    """

    memory: mmap.mmap
    is_new: bool
    tag: str


class StartedProcess:
    """A process that the server has forked for this one.

    It has what is needed of :class:`subprocess.Popen`.

    Attributes:
        stdin: writes to its standard input.
        stdout: reads its standard output.
        pid: of the process.
    """

    def __init__(self, link: Link, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._link = link

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._signal(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: when it runs on.
        """
        deadline = time.monotonic() + (_TIMEOUT_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or _TIMEOUT_S)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> int | None:
        answer, _ = self._link.ask(Signal(self.pid, number))
        assert isinstance(answer, ExitState)
        return answer.exit_code


class Link:
    """To the server. Threads may ask at once."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._loaded_before = frozenset(sys.modules)
        link.settimeout(_TIMEOUT_S)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> StartedProcess:
        """Another process of pibroch, which ends with this one."""
        answer, (stdin, stdout) = self.ask(
            StartProcess(list(arguments), dict(environment), str(log))
        )
        assert isinstance(answer, Started)
        return StartedProcess(self, answer.pid, open(stdin, "wb"), open(stdout, "rb"))

    def keep(self, key: str, tag: str, num_bytes: int) -> KeptMemory:
        """Memory of this name, tag and size.

        What is there, or new one in place of what has another tag or size.
        """
        memory = self._keep(Keep(key, tag, num_bytes))
        assert memory is not None, "it is made"
        return memory

    def kept(self, key: str) -> KeptMemory | None:
        """Memory of this name, if there is some."""
        return self._keep(Keep(key, "", 0))

    def say_loaded(self) -> None:
        """Have processes to come find loaded what this one has loaded."""
        with self._lock:
            send(
                self._link,
                Loaded(
                    [
                        name
                        for name in sys.modules
                        if name not in self._loaded_before and name != "__main__"
                    ]
                ),
            )

    def ask(self, request: Request) -> tuple[Answer, list[int]]:
        """What the server answers.

        Raises:
            ProtocolError: when it is gone.
        """
        try:
            with self._lock:
                send(self._link, request)
                return receive_answer(self._link)
        except OSError as error:
            raise ProtocolError(
                f"no answer of the process that started this one: {error}", "it alive"
            ) from error

    def _keep(self, request: Keep) -> KeptMemory | None:
        answer, descriptors = self.ask(request)
        assert isinstance(answer, KeptDescriptor)
        if not answer.num_bytes:
            return None
        try:
            return KeptMemory(
                mmap.mmap(descriptors[0], answer.num_bytes), answer.is_new, answer.tag
            )
        finally:
            os.close(descriptors[0])


_link: Link | None = None


def adopt(descriptor: int) -> None:
    """In a process that was just forked: this is its link to the server."""
    global _link
    _link = Link(socket.socket(fileno=os.dup(descriptor)))


def link_to_server() -> Link | None:
    """To the fork server that this process is from.

    ``None`` for a process that was started otherwise.
    """
    return _link
