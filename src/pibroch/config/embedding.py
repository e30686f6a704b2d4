"""The embedding tables of a run: initial values, optimizer, exchange, ids and rows.

Their width is the model's ``dim``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from pydantic import Field, model_validator

from pibroch.config.base import Section
from pibroch.config.exchange import ExchangeSection, exchanges
from pibroch.config.initializer import InitializerConfig, NormalConfig
from pibroch.config.optimizer import SparseAdamConfig, SparseOptimizerConfig
from pibroch.config.row_index import IdentityConfig, RowIndexConfig
from pibroch.errors import ConfigError

MOVED = {
    "placement": "row_wise",
    "plan": None,
    "wire": "float32",
    "compress": False,
    "lookahead": None,
    "cache_rows": None,
    "cache": "lrpp",
    "delayed_sync": True,
    "servers": None,
    "oracle": "replicated",
    "rendezvous": None,
}
"""Keys that stood beside ``exchange`` before exchanges had sections, and their defaults then."""

logger = logging.getLogger(__name__)


class TableSection(Section):
    """A ``[embedding.tables.COLUMN]`` table: what one column has of its own.

    Attributes:
        rows: in place of all that ``[embedding.rows]`` says.
    """

    rows: RowIndexConfig | None = None


class EmbeddingSection(Section):
    """The ``[embedding]`` table.

    Attributes:
        init: initial weights.
        dtype: of the weights of rows: ``float32``, or ``bfloat16`` for half their memory, rounded
            stochastically in updates.
        optimizer: applied to each touched row; its ``weight_decay`` is the embedding
            regularisation.
        exchange: how a minibatch gets its rows, by name or as a table with the settings of that
            exchange: ``auto`` is ``local`` for one process and ``alltoall`` for several;
            ``lookahead`` reads batches ahead and keeps the rows that they need where they are
            needed next.
        rows: which row an id has, by name or as a table with the settings of that kind.
        tables: what single columns have of their own.
    """

    init: InitializerConfig = NormalConfig(name="normal", std=0.01)
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: SparseOptimizerConfig = SparseAdamConfig(name="adam", lr=1e-3)
    exchange: ExchangeSection = Field(default={"name": "auto"}, validate_default=True)
    rows: RowIndexConfig = IdentityConfig()
    tables: dict[str, TableSection] = Field(default_factory=dict)

    def rows_of(self, column: str) -> RowIndexConfig:
        """Which row an id of a column has."""
        own = self.tables.get(column, TableSection()).rows
        return self.rows if own is None else own

    @model_validator(mode="before")
    @classmethod
    def _with_section(cls, raw: object) -> object:
        return with_exchange_section(raw) if isinstance(raw, Mapping) else raw


def with_exchange_section(raw: Mapping[str, object]) -> dict[str, object]:
    """An ``[embedding]`` table with a section for the exchange.

    A name alone becomes one, keys of earlier recipes move into it.

    Raises:
        ConfigError: for such a key that belongs to another exchange.
    """
    table = dict(raw)
    section = table.get("exchange", {})
    section = {"name": section} if isinstance(section, str) else section
    if isinstance(section, Mapping):
        section = {"name": "auto", **section}
        if "meet" in table:  # its name then
            table["rendezvous"] = table.pop("meet")
        moved = {key: table.pop(key) for key in MOVED if key in table}
        table["exchange"] = section | _own_keys(section["name"], moved)
    return table


def _own_keys(name: object, moved: Mapping[str, object]) -> dict[str, object]:
    """Those of the moved keys that an exchange has.

    Others may only have their defaults, or concern other exchanges alike.
    """
    sections = {each: spec.section.model_fields for each, spec in exchanges().items()}
    own = sections.get(str(name), {})
    kept = {}
    for key, value in moved.items():
        owners = [each for each, fields in sections.items() if key in fields]
        if key in own:
            kept[key] = value
        elif value != MOVED[key] and len(owners) == 1:
            raise ConfigError(
                f"`embedding.{key} = {value!r}`",
                f"nothing, or `embedding.exchange = {owners[0]!r}`, which alone has it",
            )
        if value != MOVED[key]:
            _warn_of_moved(key)
    return kept


@lru_cache
def _warn_of_moved(key: str) -> None:
    logger.warning(
        "the recipe key `embedding.%s` is `embedding.exchange.%s` now; it is still read", key, key
    )
