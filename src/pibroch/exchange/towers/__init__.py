"""Towers (DMT): tables lie with the hosts of their tower, whose outputs alone cross hosts."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from pibroch.config.exchange import ExchangeSpec, PlacedSection
from pibroch.config.tower_groups import read_groups


class TowersSection(PlacedSection):
    """Settings that all exchanges between ranks share, and which ranks and features make a tower.

    Attributes:
        ranks_per_host: so many consecutive ranks count as one host; what shares a machine does when
            absent.
        hosts_per_tower: hosts whose ranks look up a tower together; as few as the number of towers
            allows when absent.
        groups: names of each tower's features, or a file of `pibroch plan towers`; those of the
            model where it has towers, and tables in turn where it has none.
    """

    name: Literal["towers"] = "towers"
    ranks_per_host: int | None = Field(default=None, ge=1)
    hosts_per_tower: int | None = Field(default=None, ge=1)
    groups: tuple[tuple[str, ...], ...] | None = None

    @field_validator("groups", mode="before")
    @classmethod
    def _from_file(cls, value: object) -> object:
        return read_groups(Path(value)) if isinstance(value, str) else value


SPEC = ExchangeSpec(
    "towers",
    "each group of hosts holds the tables of its towers, and works on them before anything crosses"
    " hosts",
    TowersSection,
    "pibroch.exchange.towers.build:build",
    ("table_wise", "table_wise_pooled", "row_wise", "row_wise_pooled", "column_wise"),
)
