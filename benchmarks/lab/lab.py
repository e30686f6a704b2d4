"""A lab as a context manager: hosts, ranks on them, one command per rank."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Self

from benchmarks.lab.network import LINK, LabError, LinkBytes, Network, sweep
from benchmarks.lab.processes import Ended, RankProcesses

FIRST_PORT = 29500
NUM_PORTS = 1000
TAIL_BYTES = 2000
Say = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one command did.

    Attributes:
        exit_codes: of each rank; negative for a signal, the lab's own included.
        first_failed: the rank that failed first, ``None`` when none did.
        timed_out: whether the lab ended them because time was up.
        seconds: from the first start to the last end.
        links: what each host's link carried meanwhile.
        outputs: what each rank printed, both streams together.
    """

    exit_codes: tuple[int, ...]
    first_failed: int | None
    timed_out: bool
    seconds: float
    links: tuple[LinkBytes, ...]
    outputs: tuple[str, ...]

    def check(self) -> Self:
        """Itself when all ranks succeeded.

        Raises:
            LabError: with the end of the failed rank's output.
        """
        if self.timed_out:
            raise LabError(
                f"no end after {self.seconds:.0f} s",
                "a command that ends in time",
                "raise the timeout",
            )
        if self.first_failed is not None:
            tail = self.outputs[self.first_failed][-TAIL_BYTES:].strip()
            code = self.exit_codes[self.first_failed]
            raise LabError(
                f"exit code {code} from rank {self.first_failed}: {tail}",
                "exit code 0 from all ranks",
            )
        return self


class Lab:
    """Hosts joined by links of one rate.

    Leaving the ``with`` block ends what runs there and removes it.

    SIGTERM and SIGHUP, where the program leaves them alone, end it with the exit code of the
    signal, the block left on the way.

    Args:
        hosts: how many; or the :class:`Network` of a standing lab, which is used and left standing.
        ranks_per_host: processes on each.
        rate: of each host's link, e.g. ``200mbit``; ``None`` for no limit.
        threads: ``OMP_NUM_THREADS`` of each rank.

    Raises:
        PibrochError: see :meth:`Network.build`.

    Example::

        with Lab(hosts=2, rate="200mbit") as lab:
            print(lab.run(["python", "train.py"], timeout_s=60).check().links)
    """

    def __init__(
        self,
        hosts: int | Network,
        ranks_per_host: int = 1,
        rate: str | None = None,
        threads: int = 1,
    ) -> None:
        sweep()
        self._cleanup = ExitStack()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(number) == signal.SIG_DFL
            ):
                signal.signal(number, _leave)
                self._cleanup.callback(signal.signal, number, signal.SIG_DFL)
        if isinstance(hosts, Network):
            self.network = hosts
        else:
            self.network = Network.build(hosts, rate)
            self._cleanup.callback(self.network.remove)
        self.ranks_per_host = ranks_per_host
        self.threads = threads
        self._ports = count()

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return self.network.num_hosts * self.ranks_per_host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the lab, unless it was there before."""
        self._cleanup.close()

    def launcher(self, rank: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on this rank's host.

        It dies with the process that started it.
        """
        host = self.network.host(rank // self.ranks_per_host)
        return ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", host)

    def next_port(self) -> int:
        """A port for the ranks to meet at, another one each time."""
        return FIRST_PORT + next(self._ports) % NUM_PORTS

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What ``torchrun`` would set for this rank, and which interface to use."""
        host, local_rank = divmod(rank, self.ranks_per_host)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(host),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": self.network.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": LINK,
            "NCCL_SOCKET_IFNAME": LINK,
            "TP_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": str(self.threads),
        }

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        logs: Path | None = None,
        say: Say | None = None,
    ) -> RunResult:
        """Run ``command`` once per rank and wait for all.

        Blocks at most ``timeout_s`` and a few seconds for the end.

        When one fails, or time is up, the others are ended.

        Args:
            command: the same for all ranks.
            env: added to this process's environment, after the ranks' own variables.
            timeout_s: hard limit.
            logs: folder for ``rank0.log``, ...; a temporary one when absent.
            say: told each line of each rank as it comes, ``say(rank, line)``, one at a time, from
                threads of their own.

        Raises:
            LabError: when the command cannot be started.
        """
        port = self.next_port()
        before = self.network.link_bytes()
        environments = [
            os.environ | self.environment(rank, port) | dict(env or {})
            for rank in range(self.world_size)
        ]
        with tempfile.TemporaryDirectory(prefix="pibroch-lab-") as scratch:
            folder = logs or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            with RankProcesses(folder, say) as processes:
                for rank, environment in enumerate(environments):
                    processes.start([*self.launcher(rank), *command], environment)
                ended = processes.wait(timeout_s)
            outputs = tuple(
                (folder / f"rank{rank}.log").read_text("utf-8", "replace")
                for rank in range(self.world_size)
            )
        return self._result(ended, before, outputs)

    def _result(self, ended: Ended, before: list[LinkBytes], outputs: tuple[str, ...]) -> RunResult:
        readings = zip(self.network.link_bytes(), before, strict=True)
        links = tuple(after.since(earlier) for after, earlier in readings)
        return RunResult(
            ended.exit_codes, ended.first_failed, ended.timed_out, ended.seconds, links, outputs
        )


def _leave(number: int, _: FrameType | None) -> None:
    """Unwind the stack, so that what was built is removed on the way."""
    raise SystemExit(128 + number)
