"""No exchange of its own: ``local`` in one process, ``alltoall`` in several."""

from typing import Any, Literal

from pibroch.config.exchange import (
    PLACEMENTS,
    ExchangeSection,
    ExchangeSpec,
    PlacedSection,
    find_exchange,
)


class AutoSection(PlacedSection):
    """Settings for several ranks; one has no use for them."""

    name: Literal["auto"] = "auto"

    def for_ranks(self, num_ranks: int) -> ExchangeSection:
        """See :class:`ExchangeSection`."""
        name = _name_for(num_ranks)
        section = find_exchange(name).section
        chosen: ExchangeSection = section(
            **({} if name == "local" else self.options({})), name=name
        )
        return chosen


def _name_for(num_ranks: int) -> str:
    return "local" if num_ranks == 1 else "alltoall"


def _build(setup: Any, **options: object) -> object:
    name = _name_for(setup.channel.ranks.world_size)
    return find_exchange(name).build(setup, **({} if name == "local" else options))


SPEC = ExchangeSpec(
    "auto", "local in one process, alltoall in several", AutoSection, _build, PLACEMENTS
)
