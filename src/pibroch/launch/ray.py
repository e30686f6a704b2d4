"""Jobs on a cluster of Ray: an actor for each process, all in one placement group.

An actor starts its process on its node, ends with it, and keeps memory for the next one. What is
started again, and how often, is the job's to say, as on one machine: Ray places the processes,
shows what they say, and tells what was lost. Imported only where this launcher was chosen.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from pibroch.config.base import Section
from pibroch.errors import ConfigError, MissingDependencyError, TrainingError
from pibroch.forkserver.link import LINK
from pibroch.forkserver.memories import Memories
from pibroch.forkserver.messages import Keep, receive_request
from pibroch.launch.base import Launcher, RaySection, Run
from pibroch.launch.job import Group, Job, Place
from pibroch.launch.local import run_job
from pibroch.launch.machines import Machines, Process, inherited, log_of, opened_log
from pibroch.ports import free_port
from pibroch.process import LAUNCHER
from pibroch.wire.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, new_secret

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingDependencyError(
        "--launcher ray without ray", "the extra `ray`", "pip install 'pibroch[ray]'"
    ) from error

PROBE_TIMEOUT_S = 10.0
PLACE_TIMEOUT_S = 600.0
"""For room on the cluster: a node that was lost may be replaced."""
ANSWER_TIMEOUT_S = 120.0
"""For an actor that was placed to answer."""
_SHARED = ("GLOO_", "PIBROCH_", "PYTHONPATH")
"""Beginnings of variables that all processes have from the launcher."""


class RayLauncher(Launcher):
    """Runs a job's processes on a cluster of Ray."""

    section: ClassVar[type[Section]] = RaySection

    def __init__(self, section: RaySection) -> None:
        super().__init__(section)
        self._address = section.address

    def run(self, run: Run) -> int:
        """Launch a run, and again as long as something is lost and restarts are left.

        Raises:
            ConfigError: for an address where no cluster is to be joined.
            TrainingError: when the cluster has no room.
        """
        job = run.job(is_here=False)
        _join(self._address)
        try:
            cluster = _Cluster(os.environ.get(SECRET_VARIABLE) or new_secret())
            return run_job(job, run, cluster.begin, cluster)
        finally:
            ray.shutdown()


def _join(address: str) -> None:
    """Be a driver of the cluster at an address."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address {address}, which is for clients outside the cluster",
            "HOST:PORT of a cluster that this machine is part of, or auto",
            "start the run on a node, as by `ray job submit`",
        )
    host, separator, port = address.rpartition(":")
    try:
        if separator:  # Ray would try for minutes
            socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
        ray.init(address, logging_level=logging.WARNING, log_to_driver=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no cluster at --address {address} ({str(error).splitlines()[0]})",
            "HOST:PORT of its head, or auto on one of its nodes",
            "start one: ray start --head",
        ) from error


class _Actor:
    """On a node: starts one process after the other, which end with it, and keeps their memory."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._process: subprocess.Popen[bytes] | None = None
        self._memories = Memories()

    def __repr__(self) -> str:
        """What Ray shows before each line of the process."""
        return self._title

    def free_ports(self) -> tuple[int, int]:
        """Two ports of this node."""
        return free_port(), free_port()

    def heads(self, num_bytes: int) -> list[bytes]:
        """The first bytes of what is kept."""
        return self._memories.heads(num_bytes)

    def run(self, task: _Task) -> int:
        """Start a process, and wait for its end; its exit code."""
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {LAUNCHER: str(os.getpid()), LINK: str(child_end.fileno())}
        with opened_log(task.log) as log, child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pibroch", *task.arguments],
                env={**inherited(), **task.variables, **own},
                cwd=task.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[child_end.fileno()],
            )
        serving = threading.Thread(target=self._serve, args=(own_end,), daemon=True)
        serving.start()
        code = self._process.wait()
        serving.join()
        return code

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def _serve(self, link: socket.socket) -> None:
        """Keep what the process asks for, until it ends."""
        with link, suppress(OSError, msgspec.DecodeError):
            while (request := receive_request(link)) is not None:
                if isinstance(request, Keep):
                    self._memories.answer(link, request)


@dataclass(frozen=True, slots=True)
class _Task:
    arguments: list[str]
    variables: dict[str, str]
    folder: str
    log: str | None


class _RemoteProcess:
    """A process of an actor.

    It was killed where its actor is gone: that has ended with its node, or the node took it along.
    """

    pid = 0
    """Of no process of this machine."""

    def __init__(self, actor: Any, task: _Task, on_lost: Callable[[], None]) -> None:
        self._actor = actor
        self._end = actor.run.remote(task)
        self._on_lost = on_lost
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and ray.wait([self._end], timeout=0)[0]:
            try:
                self._code = ray.get(self._end)
            except RayTaskError as error:
                raise TrainingError(
                    f"a node of the cluster that starts no process: {error.cause}",
                    "pibroch, the working folder and the run's folder at the same paths on all",
                ) from error
            except RayError:
                self._code = -signal.SIGKILL
                self._on_lost()
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._actor.send_signal.remote(number)


class _Bundles(Machines):
    """Nodes that have room for a job, in a placement group of one bundle a process."""

    def __init__(self, job: Job, group: PlacementGroup, secret: str) -> None:
        self._group = group
        nodes = placement_group_table(group)["bundles_to_node_id"]
        bundles = dict[tuple[str, int], int]()
        for each in job.groups:
            own = list(range(len(bundles), len(bundles) + each.count))
            if each.are_ranks:  # neighbours are on one node
                own.sort(key=lambda bundle: nodes[bundle])
            bundles |= {(each.role, number): bundle for number, bundle in enumerate(own)}
            if each.are_ranks:
                self._nodes_of_ranks = [nodes[bundle] for bundle in own]
        self._bundles = bundles
        self._actors = dict[tuple[str, int], Any]()
        self._is_whole = True
        shared = {name: text for name, text in inherited().items() if name.startswith(_SHARED)}
        shared.pop(LAUNCHER, None)
        if SECRET_FILE_VARIABLE not in shared:
            shared[SECRET_VARIABLE] = secret
        self._shared = shared

    def heads(self, num_bytes: int) -> list[bytes] | None:
        """The first bytes of what all actors keep; ``None`` when one of them was lost."""
        asked = [actor.heads.remote(num_bytes) for actor in self._actors.values()]
        try:
            kept = ray.get(asked, timeout=PROBE_TIMEOUT_S)
        except RayError:
            self._is_whole = False
        return [head for heads in kept for head in heads] if self._is_whole else None

    def release(self) -> None:
        """Give the room back; actors end, and what they keep goes."""
        remove_placement_group(self._group)

    def place(self, job: Job) -> Place:
        """Where processes meet: on rank 0's node, at ports that are free."""
        node = self._nodes_of_ranks[0]
        host = next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)
        ranks = next(group for group in job.groups if group.are_ranks)
        asked = self._actor(ranks, 0).free_ports.remote()
        try:
            ports = ray.get(asked, timeout=ANSWER_TIMEOUT_S)
        except RayError as error:
            raise TrainingError(
                f"no answer of node {host} within {ANSWER_TIMEOUT_S:g} s ({error})",
                "a node that answers, with pibroch",
                "go on with --resume",
            ) from error
        return Place(host, ports[0], f"tcp://{host}:{ports[1]}")

    def start(
        self, job: Job, group: Group, number: int, arguments: list[str], own: dict[str, str]
    ) -> Process:
        """Have an actor start a process."""
        variables = {**self._shared, **own}
        task = _Task(arguments, variables, os.getcwd(), log_of(job, group, number))
        return _RemoteProcess(
            self._actor(group, number), task, lambda: self._lose(group.role, number)
        )

    def _actor(self, group: Group, number: int) -> Any:
        """That of a process, in its bundle; a new one where there is none, or it was lost."""
        key = group.role, number
        if key not in self._actors:
            strategy = PlacementGroupSchedulingStrategy(self._group, self._bundles[key])
            actor = ray.remote(_Actor).options(
                num_cpus=_processors(group), max_concurrency=3, scheduling_strategy=strategy
            )
            self._actors[key] = actor.remote(f"{group.title} {number}")
        return self._actors[key]

    def _lose(self, role: str, number: int) -> None:
        self._is_whole = False
        self._actors.pop((role, number), None)

    def ranks_beside(self, job: Job, rank: int) -> range:
        """Ranks of the same node."""
        nodes = self._nodes_of_ranks
        first = nodes.index(nodes[rank])
        return range(first, first + nodes.count(nodes[rank]))


class _Cluster:
    """Room for a job, and the memory of its processes, for as long as nothing of it is lost."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._bundles: _Bundles | None = None

    @contextmanager
    def begin(self, job: Job) -> Iterator[tuple[Machines, Place]]:
        """For one life of the job, see :data:`pibroch.launch.local.Begin`."""
        if self._bundles is None or self._bundles.heads(1) is None:
            self.forget()
            self._bundles = _placed(job, self._secret)
        yield self._bundles, self._bundles.place(job)

    def heads(self, num_bytes: int) -> list[bytes]:
        """The first bytes of all that is kept; nothing once a part of it was lost."""
        return [] if self._bundles is None else self._bundles.heads(num_bytes) or []

    def forget(self) -> None:
        """Give the room back, and all that is kept there."""
        if self._bundles is not None:
            self._bundles.release()
            self._bundles = None


def _placed(job: Job, secret: str) -> _Bundles:
    """Room for a job; blocks until there is some."""
    bundles = [{"CPU": _processors(group)} for group in job.groups for _ in range(group.count)]
    group = placement_group(bundles, strategy="SPREAD")
    try:
        ray.get(group.ready(), timeout=PLACE_TIMEOUT_S)
    except GetTimeoutError as error:
        has = ray.cluster_resources().get("CPU", 0)
        raise TrainingError(
            f"a cluster of {has:g} processors without room for {len(bundles)} processes within"
            f" {PLACE_TIMEOUT_S:g} s",
            f"{sum(bundle['CPU'] for bundle in bundles)}, as each takes one or its threads",
            "add nodes, and go on with --resume",
        ) from error
    return _Bundles(job, group, secret)


def _processors(group: Group) -> int:
    """That each process of a group is given."""
    return group.threads or 1
