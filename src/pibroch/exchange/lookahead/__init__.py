"""Lookahead training (BagPipe, SOSP'23).

Rows wait where they are needed next, and little is waited for.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import AliasChoices, Field, model_validator

from pibroch.config.exchange import ExchangeSpec, PlacedSection

SERVER = "embedding-server"
ORACLE = "oracle"


class LookaheadSection(PlacedSection):
    """Records that move for good are float32 on any wire.

    Attributes:
        lookahead: batches that are read ahead; when absent as many as the cache holds, 200 at most.
        cache_rows: rows of other ranks that a rank can keep; when absent what fits into half of the
            free memory.
        cache: which design of the cache (BagPipe, Sec. 3.3); the other two are there to be compared
            with.
        delayed_sync: whether updates that the next step does not need cross beside it.
        servers: embedding servers that hold the rows in place of the ranks; started on this machine
            with the run, unless ``rendezvous`` says where they are.
        oracle: who plans: every rank for itself (``replicated``), or one process for all
            (``central``), started as servers are.
        rendezvous: ``tcp://host:port`` of servers and oracle that run already, see ``pibroch
            embedding-server --help``.
        assign: which rank trains which sample of a global batch: as the data have them
            (``given``), or where most of its rows are (``rows``).
    """

    name: Literal["lookahead"] = "lookahead"
    lookahead: int | None = Field(default=None, ge=1)
    cache_rows: int | None = Field(default=None, ge=0)
    cache: Literal["lrpp", "partitioned", "replicated"] = "lrpp"
    delayed_sync: bool = True
    servers: int | None = Field(default=None, ge=1)
    oracle: Literal["replicated", "central"] = "replicated"
    assign: Literal["given", "rows"] = "given"
    # `meet` is its former name
    rendezvous: str | None = Field(
        default=None, validation_alias=AliasChoices("rendezvous", "meet")
    )

    @model_validator(mode="after")
    def _somebody_there(self) -> Self:
        if self.rendezvous is not None and not self.helpers():
            raise ValueError(
                "takes `rendezvous` with `servers`, the number of those that meet there, or `oracle"
                " = 'central'`"
            )
        return self

    def options(self, workers: Mapping[str, Sequence[str]]) -> dict[str, object]:
        """See :class:`ExchangeSection`."""
        own = self.model_dump(exclude={"name", "rendezvous"})
        oracles = workers.get(ORACLE, ())
        return own | {
            "servers": tuple(workers.get(SERVER, ())),
            "oracle": oracles[0] if oracles else None,
        }

    def helpers(self) -> dict[str, int]:
        """See :class:`ExchangeSection`."""
        wanted = {SERVER: self.servers or 0, ORACLE: int(self.oracle == "central")}
        return {command: count for command, count in wanted.items() if count}

    def duties(self) -> dict[str, str]:
        """See :class:`ExchangeSection`."""
        length = (
            "as far as the cache holds" if self.lookahead is None else f"{self.lookahead} steps"
        )
        how = "for all trainers, from the rows that they send"
        if self.oracle != "central":
            how = "all plan the same, so no plan is sent"
        plans = (
            f"plans what travels, {length} ahead{';' if self.oracle != 'central' else ','} {how}"
        )
        homes = f"keeps the records of its part of the rows ({self.placed()})"
        return {ORACLE: plans} | ({} if self.servers is None else {SERVER: homes})

    def helper_rendezvous(self) -> str | None:
        """See :class:`ExchangeSection`."""
        return self.rendezvous


SPEC = ExchangeSpec(
    "lookahead",
    "reads batches ahead and keeps each row where it is read next; the rest as alltoall",
    LookaheadSection,
    "pibroch.exchange.lookahead.build:build",
    ("row_wise", "table_wise"),
)
