"""What an assigner has to know of an exchange: which rows features read, and where these lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pibroch.embedding.row_index import IdentityIndex, ReaderIndices
from pibroch.errors import ConfigError, ProtocolError
from pibroch.kernels.arrays import Ints
from pibroch.kernels.route import Homes

BETWEEN_HOSTS = 8
"""What a row costs between hosts, where one costs 1 between ranks of a host."""


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of one width.

    Attributes:
        features: that read them.
        index: from their ids to rows.
        homes: of the rows.
        bounds: int64 ``[P + 1]``, first address of each shard.
        num_everywhere: rows that every rank has, the first ones.
        width: weights in a row.
    """

    features: tuple[str, ...]
    index: ReaderIndices
    homes: Homes
    bounds: Ints
    num_everywhere: int
    width: int


@dataclass(frozen=True, slots=True)
class RowsOf:
    """The rows of an exchange.

    Attributes:
        lanes: a row is of one of them.
        num_ranks: W; shards beyond are servers'.
        horizon: steps after which a row that nobody reads is at home; 0 where rows never leave it.
        host_of_rank: where ranks of one host reach each other sooner; empty where all are alike.
    """

    lanes: tuple[LaneRows, ...]
    num_ranks: int
    horizon: int
    host_of_rank: tuple[int, ...] = ()

    @property
    def price(self) -> Ints:
        """Of a row's way from each rank to each other, ``[W, W]``."""
        one = 1 - np.eye(self.num_ranks, dtype=np.int64)
        if len(set(self.host_of_rank)) <= 1 or len(set(self.host_of_rank)) == self.num_ranks:
            return one
        hosts = np.asarray(self.host_of_rank)
        return np.where(hosts[:, None] == hosts[None, :], one, BETWEEN_HOSTS)

    def described(self) -> str:
        """All of it as JSON, for who assigns samples in another process.

        Raises:
            ConfigError: where rows do not follow from ids by arithmetic.
        """
        if any(len(lane.homes.partition) or not lane.index.is_identity for lane in self.lanes):
            raise ConfigError(
                "assign 'rows' by data processors, under homes of single rows or an index of rows"
                " of its own",
                "a placement such as row_wise or table_wise, of tables whose ids are rows",
                "leave `assign` out, or let trainers read the data",
            )
        lanes = [
            [
                lane.features,
                lane.homes.num_rows.tolist(),
                lane.homes.num_parts.tolist(),
                lane.homes.first_address.tolist(),
                lane.bounds.tolist(),
                lane.num_everywhere,
                lane.width,
            ]
            for lane in self.lanes
        ]
        return json.dumps([lanes, self.num_ranks, self.horizon, self.host_of_rank])

    @classmethod
    def of_described(cls, text: str) -> Self:
        """What :meth:`described` was made of.

        Raises:
            ProtocolError: for what it never gives.
        """
        try:
            described, num_ranks, horizon, hosts = json.loads(text)
            lanes = tuple(_lane(*each) for each in described)
        except (ValueError, TypeError) as error:
            raise ProtocolError("numbers that are no homes of rows", "homes of rows") from error
        return cls(lanes, int(num_ranks), int(horizon), tuple(hosts))


def _lane(
    features: Sequence[str],
    num_rows: Sequence[int],
    num_parts: Sequence[int],
    first_address: Sequence[Sequence[int]],
    bounds: Sequence[int],
    num_everywhere: int,
    width: int,
) -> LaneRows:
    first = np.array(first_address, np.int64)
    homes = Homes(
        np.array(num_rows, np.int64),
        np.array(num_parts, np.uint32),
        first,
        np.full(len(features), -1),
        np.empty(0, np.uint16),
        np.empty(0, np.uint32),
        np.empty(0, np.int64),
    )
    if not len(homes.num_rows) == len(homes.num_parts) == len(features) == len(first):
        raise ValueError("as many of each as features")
    if homes.num_parts.min() < 1 or homes.num_parts.max() > first.shape[1]:
        raise ValueError("parts that have a first address")
    index = ReaderIndices(features, [IdentityIndex(int(rows)) for rows in num_rows])
    return LaneRows(
        tuple(features), index, homes, np.array(bounds, np.int64), int(num_everywhere), int(width)
    )
