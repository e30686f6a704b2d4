"""Who reads from whom at which cost: ranks, their hosts and memory, and OPER's cost matrix.

See Sec. 3.2.

A topology is given by a file, or made by :meth:`ClusterTopology.uniform` and
:meth:`ClusterTopology.hierarchical`. Of a file::

    hosts = [4, 4]             # ranks of each host; or:  host_of_rank = [0, 0, 1, 1]
    memory_bytes = [16e9]      # for tables: one for all ranks, or one a rank; absent: no bound
    within_host = 1.0          # cost of a byte from a rank of the same host; absent: 1
    between_hosts = 4.21       # and from another host's; absent: as within a host
    own = 0.0                  # and from a rank's own memory; absent: 0
    # cost = [[...], ...]      # instead of the three: cost[i][j] of a byte, i reads from j
    p2p_bandwidth = 25e9       # bytes a second, for the frequency rule of Sec. 4.3
    all_reduce_bandwidth = 20e9
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pibroch.errors import ConfigError

MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    """Ranks and the cost of reading between them.

    Attributes:
        host_of_rank: the host of each rank.
        cost: float64 ``[W, W]``, ``L`` in the paper: ``cost[i, j]`` is that of a byte which rank i
            reads from rank j, on the diagonal of one from its own memory.
        memory_bytes: float64 ``[W]``, room for tables on each rank; infinite where nothing is
            known.
        p2p_bandwidth: bytes a second between two ranks.
        all_reduce_bandwidth: bytes a second in an all-reduce.
    """

    host_of_rank: tuple[int, ...]
    cost: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    p2p_bandwidth: float = 1.0
    all_reduce_bandwidth: float = 1.0

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.host_of_rank)

    @property
    def crosses_hosts(self) -> NDArray[np.bool_]:
        """Whether two ranks have different hosts, bool ``[W, W]``."""
        hosts = np.array(self.host_of_rank)
        return np.asarray(hosts[:, None] != hosts[None, :])

    @classmethod
    def uniform(cls, num_ranks: int, memory_bytes: float = np.inf) -> Self:
        """Ranks of one host (or of equal links).

        Each byte from another rank costs 1, one's own nothing.

        >>> ClusterTopology.uniform(2).cost.tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        return cls.hierarchical(1, num_ranks, 1.0, memory_bytes)

    @classmethod
    def hierarchical(
        cls, num_hosts: int, ranks_per_host: int, ratio: float, memory_bytes: float = np.inf
    ) -> Self:
        """Hosts of equally many ranks.

        A byte from another host costs ``ratio``, one from another rank of the same host 1.

        >>> ClusterTopology.hierarchical(2, 1, 4.21).cost.tolist()
        [[0.0, 4.21], [4.21, 0.0]]

        Raises:
            ConfigError: for fewer than one rank, or a ratio that is not positive.
        """
        return cls.of(
            {
                "hosts": [ranks_per_host] * num_hosts,
                "between_hosts": ratio,
                "memory_bytes": memory_bytes,
            },
            "the topology",
        )

    @classmethod
    def of(cls, content: dict[str, Any], source: str) -> Self:
        """A topology from what a file holds.

        Raises:
            ConfigError: naming the key that is wrong.
        """
        try:
            spec = _TopologyFile.model_validate(content)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                keys = ", ".join(_TopologyFile.model_fields)
                raise ConfigError(
                    f"unknown key `{key}` in {source}", f"one of {keys}", f"remove `{key}`"
                ) from error
            got = f"`{key} = {problem['input']!r:.60}` in {source}" if key else source
            message = problem["msg"].removeprefix("Value error, ")
            raise ConfigError(
                got, message, "see `pibroch plan --help` for what a topology file holds"
            ) from error
        hosts = np.array(spec.hosts_of_ranks)
        same = hosts[:, None] == hosts[None, :]
        between = spec.within_host if spec.between_hosts is None else spec.between_hosts
        cost = np.where(same, spec.within_host, between)
        np.fill_diagonal(cost, spec.own)
        if spec.cost is not None:
            cost = np.array(spec.cost)
        memory = np.broadcast_to(
            np.array(np.inf if spec.memory_bytes is None else spec.memory_bytes, float), len(hosts)
        )
        return cls(
            tuple(hosts.tolist()),
            cost.astype(float),
            np.array(memory),
            spec.p2p_bandwidth,
            spec.all_reduce_bandwidth,
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a topology from a TOML or JSON file.

        Raises:
            ConfigError: when there is none, or it is none.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
            content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}, unreadable: {error}", "a topology in TOML or JSON", "check the path"
            ) from error
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}, which holds no keys",
                "a topology in TOML or JSON",
                "see `pibroch plan --help`",
            )
        return cls.of(content, str(path))

    def check(self, num_shards: int) -> None:
        """Raise ConfigError unless there is a rank for each shard."""
        if self.num_ranks != num_shards:
            raise ConfigError(
                f"a topology of {self.num_ranks} ranks for {num_shards} shards",
                "one rank a shard",
                "correct `hosts` in the topology, or the number of shards",
            )


class _TopologyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hosts: list[int] | None = None
    host_of_rank: list[int] | None = None
    memory_bytes: float | list[float] | None = None
    own: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    within_host: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    between_hosts: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cost: list[list[float]] | None = None
    p2p_bandwidth: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    all_reduce_bandwidth: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @property
    def hosts_of_ranks(self) -> list[int]:
        if self.host_of_rank is not None:
            return self.host_of_rank
        return [host for host, ranks in enumerate(self.hosts or []) for _ in range(ranks)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.hosts is None) == (self.host_of_rank is None):
            raise ValueError("exactly one of `hosts` (ranks of each) and `host_of_rank`")
        if self.hosts is not None and any(ranks < 1 for ranks in self.hosts):
            raise ValueError(f"at least one rank a host, got hosts = {self.hosts}")
        num_ranks = len(self.hosts_of_ranks)
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"1 to {MAX_RANKS} ranks, got {num_ranks}")
        if isinstance(self.memory_bytes, list) and len(self.memory_bytes) not in (1, num_ranks):
            raise ValueError(
                f"`memory_bytes` for each of {num_ranks} ranks, got {len(self.memory_bytes)}"
            )
        memory = (
            self.memory_bytes if isinstance(self.memory_bytes, list) else [self.memory_bytes or 1.0]
        )
        if not all(one > 0 for one in memory):
            raise ValueError(f"positive `memory_bytes`, got {self.memory_bytes}")
        if self.cost is not None:
            self._check_cost(num_ranks)
        return self

    def _check_cost(self, num_ranks: int) -> None:
        assert self.cost is not None, "checked by the caller"
        if self.model_fields_set & {"own", "within_host", "between_hosts"}:
            raise ValueError("`cost`, or `own`, `within_host` and `between_hosts`, not both")
        widths = {len(row) for row in self.cost}
        if len(self.cost) != num_ranks or widths != {num_ranks}:
            raise ValueError(
                f"`cost` of {num_ranks} rows of {num_ranks}, got {len(self.cost)} of"
                f" {sorted(widths)}"
            )
        cost = np.array(self.cost)
        if not np.isfinite(cost).all() or (cost < 0).any():
            raise ValueError("finite costs of at least 0")
        others = ~np.eye(num_ranks, dtype=bool)
        if (cost[others] <= 0).any() or (
            np.diag(cost)[:, None] > np.where(others, cost, np.inf)
        ).any():
            raise ValueError(
                "costs above 0 between ranks, and none below that of the reader's own memory"
            )
