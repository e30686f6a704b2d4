"""The exchange of one process: every row is here. The reference for all others."""

from typing import Literal

from pibroch.config.exchange import ExchangeSection, ExchangeSpec


class LocalSection(ExchangeSection):
    """Nothing to choose."""

    name: Literal["local"] = "local"


SPEC = ExchangeSpec(
    "local",
    "one process holds all rows",
    LocalSection,
    "pibroch.exchange.local.exchange:LocalExchange.build",
    most_ranks=1,
)
