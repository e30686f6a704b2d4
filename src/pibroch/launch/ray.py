"""Jobs on a cluster of Ray: an actor for each process, all in one placement group.

An actor starts its process on its node and ends with it. What is started again, and how often, is
the job's to say, as on one machine: Ray places the processes, shows what they say, and tells what
was lost. Imported only where this launcher was chosen.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from pibroch.config.base import Section
from pibroch.errors import ConfigError, MissingDependencyError, TrainingError
from pibroch.launch.base import Launcher, RaySection, Run
from pibroch.launch.job import Group, Job, Place
from pibroch.launch.local import run_job
from pibroch.launch.machines import Machines, Process, inherited, log_of, opened_log
from pibroch.ports import free_port
from pibroch.process import LAUNCHER
from pibroch.rpc.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, new_secret

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
            secret = os.environ.get(SECRET_VARIABLE) or new_secret()
            return run_job(job, run, lambda job: _placed(job, secret))
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
    """On a node: starts one process, and ends with it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        """What Ray shows before each line of the process."""
        return self._title

    def free_ports(self) -> tuple[int, int]:
        """Two ports of this node."""
        return free_port(), free_port()

    def run(self, task: _Task) -> int:
        """Start a process, and wait for its end; its exit code."""
        variables = {**inherited(), **task.variables, LAUNCHER: str(os.getpid())}
        with opened_log(task.log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pibroch", *task.arguments],
                env=variables,
                cwd=task.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._process is not None:
            self._process.send_signal(number)


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

    def __init__(self, actor: Any, task: _Task) -> None:
        self._actor = actor
        self._end = actor.run.remote(task)
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
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._actor.send_signal.remote(number)


class _Bundles(Machines):
    """Nodes that have room for a job, in a placement group of one bundle a process.

    Args:
        job: whose processes they are for.
        group: Ray's.
        secret: the job's.
    """

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
        shared = {name: text for name, text in inherited().items() if name.startswith(_SHARED)}
        shared.pop(LAUNCHER, None)
        if SECRET_FILE_VARIABLE not in shared:
            shared[SECRET_VARIABLE] = secret
        self._shared = shared

    def actor(self, group: Group, number: int) -> Any:
        """A new one in the bundle of a process."""
        strategy = PlacementGroupSchedulingStrategy(self._group, self._bundles[group.role, number])
        options = {"max_concurrency": 2, "scheduling_strategy": strategy}
        actor = ray.remote(_Actor).options(num_cpus=_processors(group), **options)
        return actor.remote(f"{group.title} {number}")

    def place(self, job: Job) -> Place:
        """Where processes meet: on rank 0's node, at ports that are free."""
        node = self._nodes_of_ranks[0]
        host = next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)
        ranks = next(group for group in job.groups if group.are_ranks)
        actor = self.actor(ranks, 0)
        try:
            ports = ray.get(actor.free_ports.remote(), timeout=ANSWER_TIMEOUT_S)
        except GetTimeoutError as error:
            raise TrainingError(
                f"no answer of node {host} within {ANSWER_TIMEOUT_S:g} s", "a node that answers"
            ) from error
        finally:
            ray.kill(actor)
        return Place(host, ports[0], f"tcp://{host}:{ports[1]}")

    def start(
        self, job: Job, group: Group, number: int, arguments: list[str], own: dict[str, str]
    ) -> Process:
        """Have a new actor start a process."""
        variables = {**self._shared, **own}
        task = _Task(arguments, variables, os.getcwd(), log_of(job, group, number))
        return _RemoteProcess(self.actor(group, number), task)

    def ranks_beside(self, job: Job, rank: int) -> range:
        """Ranks of the same node."""
        nodes = self._nodes_of_ranks
        first = nodes.index(nodes[rank])
        return range(first, first + nodes.count(nodes[rank]))


@contextmanager
def _placed(job: Job, secret: str) -> Iterator[tuple[Machines, Place]]:
    bundles = [{"CPU": _processors(group)} for group in job.groups for _ in range(group.count)]
    with ExitStack() as stack:
        group = placement_group(bundles, strategy="SPREAD")
        stack.callback(remove_placement_group, group)
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
        machines = _Bundles(job, group, secret)
        yield machines, machines.place(job)


def _processors(group: Group) -> int:
    """That each process of a group is given."""
    return group.threads or 1
