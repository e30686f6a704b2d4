"""Namespaces, bridge and shaped links of one lab.

Made, measured and removed with ``ip`` and ``tc``.

A lab called L consists of the namespaces ``pibroch-lab-L-switch`` (the bridge) and
``pibroch-lab-L-host0``, ``-host1``, ...; a host's only link is ``eth0``. The name of a lab that
belongs to a process is ``PID.START.NUMBER``, which tells a dead owner.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Self

from pibroch.errors import ConfigError, MissingDependencyError, PibrochError

PREFIX = "pibroch-lab-"
LINK = "eth0"
LOOPBACK = "lo"
COMMAND_TIMEOUT_S = 30.0
QUEUE_MS = 200
MIN_BURST_BYTES = 128 << 10
MAX_HOSTS = 250
RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
BITS = {"k": 1e3, "m": 1e6, "g": 1e9}

_numbers = count()


class LabError(PibrochError):
    """A lab that could not be built, or a command in it that failed."""


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What one host's link carried, headers included."""

    sent: int
    received: int

    def since(self, before: LinkBytes) -> LinkBytes:
        """What it carried between two readings."""
        return LinkBytes(self.sent - before.sent, self.received - before.received)


def burst_of(rate: str) -> int:
    """Bytes that a link of a rate lets through at once where it has idled.

    A millisecond's, or what kernels hand over as one.
    """
    return max(MIN_BURST_BYTES, int((_bits_per_second(rate) or 0.0) / 8 * 1e-3))


class Network:
    """The namespaces of one lab.

    Args:
        name: of the lab.
        num_hosts: hosts, ``host0`` first.
    """

    def __init__(self, name: str, num_hosts: int) -> None:
        self.name = name
        self.num_hosts = num_hosts

    @classmethod
    def build(cls, num_hosts: int, rate: str | None, is_standing: bool = False) -> Self:
        """Make the namespaces and shape their links; removes what it made when it fails.

        Args:
            num_hosts: how many.
            rate: of each link in each direction, e.g. ``200mbit``; ``None`` leaves them as quick as
                the machine.
            is_standing: outlive this process until someone removes it.

        Raises:
            ConfigError: for a number of hosts or a rate that makes no sense.
            MissingDependencyError: without ``ip``, ``tc`` or ``setpriv``.
            LabError: without the right to make namespaces.
        """
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ConfigError(f"{num_hosts} hosts", f"1 to {MAX_HOSTS}")
        _bits_per_second(rate)
        _need_tools()
        name = (
            secrets.token_hex(3)
            if is_standing
            else f"{os.getpid()}.{_start_ticks(os.getpid())}.{next(_numbers)}"
        )
        network = cls(name, num_hosts)
        try:
            network._build()
            network.shape(rate)
        except BaseException:
            network.remove()
            raise
        return network

    @classmethod
    def find(cls, name: str) -> Self:
        """An existing lab.

        Raises:
            ConfigError: when there is none of this name.
        """
        standing = labs()
        if name not in standing:
            raise ConfigError(
                f"lab {name!r}",
                f"one of {sorted(standing)}" if standing else "one made by `up` before",
            )
        return cls(name, sum("-host" in namespace for namespace in standing[name]))

    def host(self, index: int) -> str:
        """Namespace of a host."""
        return f"{PREFIX}{self.name}-host{index}"

    def address(self, index: int) -> str:
        """IPv4 address of a host; labs do not see each other, so all have the same ones."""
        return f"10.77.0.{index + 1}"

    @property
    def _switch(self) -> str:
        return f"{PREFIX}{self.name}-switch"

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for index in range(self.num_hosts):
            host = self.host(index)
            port = f"port{index}"
            _run("ip", "netns", "add", host)
            _run(
                "ip",
                "-n",
                self._switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                LINK,
                "netns",
                host,
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(index)}/24", "dev", LINK)
            _run("ip", "-n", host, "link", "set", LINK, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")

    def plug(self, index: int, is_in: bool) -> None:
        """Pull a host's cable out of the switch, or put it back.

        What is sent meanwhile is lost, and sent again later.
        """
        _run("ip", "-n", self._switch, "link", "set", f"port{index}", "up" if is_in else "down")

    def shape(self, rate: str | None) -> None:
        """Limit both ends of each link to ``rate``; ``None`` lifts the limit.

        May be called again at any time.
        """
        bits = _bits_per_second(rate)
        for index in range(self.num_hosts):
            for namespace, device in ((self.host(index), LINK), (self._switch, f"port{index}")):
                where = ("tc", "-n", namespace, "qdisc")
                if rate is None or bits is None:
                    _run(*where, "replace", "dev", device, "root", "pfifo_fast")
                    continue
                limits = ("rate", rate, "burst", str(burst_of(rate)), "latency", f"{QUEUE_MS}ms")
                _run(*where, "replace", "dev", device, "root", "tbf", *limits)

    def link_bytes(self) -> list[LinkBytes]:
        """What each host's link carried so far, by the interface's counters."""
        return [self._carried(index, LINK) for index in range(self.num_hosts)]

    def loopback_bytes(self) -> list[int]:
        """Bytes that hosts' processes sent each other by sockets; shared memory is not counted."""
        return [self._carried(index, LOOPBACK).sent for index in range(self.num_hosts)]

    def _carried(self, index: int, device: str) -> LinkBytes:
        shown = json.loads(_run("ip", "-n", self.host(index), "-s", "-j", "link", "show", device))[
            0
        ]["stats64"]
        return LinkBytes(shown["tx"]["bytes"], shown["rx"]["bytes"])

    def pids(self) -> list[int]:
        """Processes in the lab."""
        return _pids([self.host(index) for index in range(self.num_hosts)])

    def remove(self) -> None:
        """End all processes in the lab and delete its namespaces, with links and bridge."""
        _remove(labs().get(self.name, []))


def obstacle() -> str | None:
    """Why no lab can be built here, or ``None`` when one can; tries it."""
    try:
        Network.build(1, "1gbit").remove()
    except PibrochError as error:
        return str(error)
    return None


def labs() -> dict[str, list[str]]:
    """All labs of this machine: name to namespaces."""
    results: dict[str, list[str]] = {}
    for line in _run("ip", "netns", "list").splitlines():
        namespace = line.split()[0]
        if namespace.startswith(PREFIX):
            results.setdefault(namespace.removeprefix(PREFIX).rpartition("-")[0], []).append(
                namespace
            )
    return results


def standing_labs() -> list[str]:
    """Names of the labs that belong to no process."""
    return sorted(name for name in labs() if "." not in name)


def sweep() -> list[str]:
    """Remove the labs whose owners have died; returns their names.

    Labs of the living and standing ones stay.
    """
    _need_tools()
    dead = {
        name: namespaces
        for name, namespaces in labs().items()
        if "." in name and not _owner_lives(name)
    }
    for namespaces in dead.values():
        _remove(namespaces)
    return sorted(dead)


def _owner_lives(name: str) -> bool:
    pid, start, _ = name.split(".")
    return _start_ticks(int(pid)) == int(start)


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot.

    Tells it from a later one of the same number.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _remove(namespaces: list[str]) -> None:
    for pid in _pids(namespaces):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for namespace in namespaces:
        with suppress(LabError):  # another sweep was quicker
            _run("ip", "netns", "del", namespace)


def _pids(namespaces: list[str]) -> list[int]:
    pids: list[int] = []
    for namespace in namespaces:
        with suppress(LabError):  # the namespace has gone
            pids += map(int, _run("ip", "netns", "pids", namespace).split())
    return pids


def _bits_per_second(rate: str | None) -> float | None:
    """Bits a second of e.g. ``200mbit``."""
    if rate is None:
        return None
    match = RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"rate {rate!r}", "a number and kbit, mbit or gbit, e.g. 200mbit")
    return float(match[1]) * BITS[match[2]]


@lru_cache(maxsize=1)
def _need_tools() -> None:
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            raise MissingDependencyError(
                f"no `{tool}` on the path",
                f"{package}, to make network namespaces",
                f"apt-get install {package}",
            )
    if os.geteuid() != 0:
        raise LabError(
            "a user without root's rights", "root, to make network namespaces", "run it with sudo"
        )


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"`{' '.join(command)}`: {error}", "a command that works") from error
    if done.returncode != 0:
        raise LabError(
            f"`{' '.join(command)}`: {done.stderr.strip()}",
            "a kernel with network namespaces, bridge, veth and tbf, and the right to use them",
            "run it as root outside of restricted containers",
        )
    return done.stdout
