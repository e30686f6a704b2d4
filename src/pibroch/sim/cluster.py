"""Hosts, ranks, and the links and cores that they share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t)bit", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def bytes_per_second(rate: str) -> float:
    """Of a rate as ``tc`` writes it.

    >>> bytes_per_second("200mbit")
    25000000.0

    Raises:
        ConfigError: for what is no rate, or none above zero.
    """
    match = _RATE.fullmatch(rate.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"a link of {rate!r}",
            "a number above zero and kbit, mbit, gbit or tbit",
            "for example --link 100gbit",
        )
    return float(match[1]) * _BITS[match[2].lower()] / 8


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of equally many ranks.

    Attributes:
        num_hosts, ranks_per_host: of them.
        link: bytes a second between hosts, of each, each way.
        local: bytes a second within a host, of each rank.
        cores: of a machine.
        hosts_per_machine: hosts that share a machine's cores, as in a lab; 1 elsewhere.
        burst: bytes that a host's link lets through at once where it has idled for as long as they
            would take: the bucket of ``tc tbf``, or of a cloud's limit.
    """

    num_hosts: int
    ranks_per_host: int
    link: float
    local: float
    cores: float
    hosts_per_machine: int = 1
    burst: float = 0.0

    def __post_init__(self) -> None:
        counts = self.num_hosts, self.ranks_per_host, self.hosts_per_machine
        if min(counts) < 1:
            raise ConfigError(f"hosts, ranks and hosts a machine {counts}", "at least 1 each")
        if self.burst < 0:
            raise ConfigError(f"bursts of {self.burst:g} bytes", "none or more")
        if min(self.link, self.local, self.cores) <= 0:
            raise ConfigError(
                f"links of {self.link:g} and {self.local:g} bytes a second, {self.cores:g} cores",
                "more than none",
                "raise --link, --local or --cores",
            )

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.num_hosts * self.ranks_per_host

    @property
    def host_of_rank(self) -> NDArray[np.int64]:
        """``[W]``."""
        return np.repeat(np.arange(self.num_hosts), self.ranks_per_host)

    @property
    def machine_of_rank(self) -> NDArray[np.int64]:
        """``[W]``."""
        return self.host_of_rank // self.hosts_per_machine

    @property
    def num_machines(self) -> int:
        """That the hosts are on."""
        return -(-self.num_hosts // self.hosts_per_machine)


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of one message exchange of each rank, ``[W]`` each, to and from other ranks.

    Attributes:
        out_link, in_link: that leave and come to its host.
        out_local, in_local: that stay within it.
    """

    out_link: NDArray[np.float64]
    in_link: NDArray[np.float64]
    out_local: NDArray[np.float64]
    in_local: NDArray[np.float64]

    @property
    def out(self) -> NDArray[np.float64]:
        """All that each rank sends."""
        return self.out_link + self.out_local

    @classmethod
    def of(cls, sent: NDArray[np.number], hosts: NDArray[np.int64]) -> Flow:
        """From bytes from rank to rank, ``[W, W]``."""
        crosses = hosts[:, None] != hosts[None, :]
        across = np.where(crosses, sent, 0).astype(np.float64)
        near = np.where(crosses, 0, sent).astype(np.float64)
        return cls(across.sum(1), across.sum(0), near.sum(1), near.sum(0))

    @classmethod
    def ring(cls, num_bytes: float, hosts: NDArray[np.int64]) -> Flow:
        """Of a sum over all ranks, of which each sends its share to the rank before it."""
        return cls.rings([num_bytes], [range(len(hosts))], hosts)

    @classmethod
    def rings(
        cls, num_bytes: Sequence[float], groups: Sequence[Sequence[int]], hosts: NDArray[np.int64]
    ) -> Flow:
        """Of a sum over each of some groups of ranks, of as many bytes each."""
        flow = cls(*(np.zeros(len(hosts)) for _ in range(4)))
        for of_group, members in zip(num_bytes, groups, strict=True):
            ranks = np.array(members)
            size = len(ranks)
            share = 2 * (size - 1) / size * of_group
            crosses_out = (hosts[ranks] != np.roll(hosts[ranks], 1)) * share
            crosses_in = (hosts[ranks] != np.roll(hosts[ranks], -1)) * share
            flow.out_link[ranks] = crosses_out
            flow.in_link[ranks] = crosses_in
            flow.out_local[ranks] = share - crosses_out
            flow.in_local[ranks] = share - crosses_in
        return flow
