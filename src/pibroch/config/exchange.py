"""Which exchanges there are: what each is called, its settings, and where it is built.

An exchange is a package whose ``__init__`` holds an :class:`ExchangeSpec` named ``SPEC`` and the
section that recipes have for it, and imports nothing but :mod:`pibroch.config`; the rest of it
loads when it is chosen. How others are found says :mod:`pibroch.config.registry`;
``docs/extending.md`` adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import ValidationInfo, field_validator, model_validator

from pibroch.config.registry import Choice, Registry, Spec
from pibroch.errors import ConfigError

PlacementKind = Literal[
    "table_wise", "table_wise_pooled", "row_wise", "row_wise_pooled", "column_wise", "replicated"
]
PLACEMENTS: tuple[str, ...] = get_args(PlacementKind)
OWNERS_POOL = ("table_wise_pooled", "row_wise_pooled")
"""Placements under which bags and vectors travel, and not rows."""

BUILT_IN = ("local", "alltoall", "auto", "lookahead", "retrieve", "towers")
"""Packages of ``pibroch.exchange``: one line for each exchange."""
BITS_AT_ONCE = 1024
"""Bits fit into this many words: up to there ranks name copied rows by a bit each.

They do not send their number first.
"""


@dataclass(frozen=True, slots=True)
class ExchangeSpec(Spec):
    """An exchange, before it is loaded.

    ``factory`` makes it of a :class:`pibroch.exchange.base.Setup` and its options by name.

    Attributes:
        placements: kinds of placement that it takes, see :mod:`pibroch.planner.plan`; none where
            one process has all rows.
        most_ranks: that can use it; ``None`` for any number.
    """

    placements: tuple[str, ...] = ()
    most_ranks: int | None = None


EXCHANGES = Registry(
    "exchange",
    "pibroch.exchanges",
    ExchangeSpec,
    "pibroch.exchange.base:Exchange",
    [f"pibroch.exchange.{name}:SPEC" for name in BUILT_IN],
)
register_exchange = EXCHANGES.register
find_exchange = EXCHANGES.find
exchanges = EXCHANGES.all


class ExchangeSection(Choice):
    """The ``[embedding.exchange]`` table of a recipe; each exchange adds its own settings."""

    registry: ClassVar[Registry[ExchangeSpec]] = EXCHANGES

    def for_ranks(self, num_ranks: int) -> ExchangeSection:
        """What is meant where so many ranks train.

        Raises:
            ConfigError: when they cannot use it.
        """
        most = find_exchange(self.name).most_ranks
        if most is not None and num_ranks > most:
            raise ConfigError(
                f"embedding.exchange {self.name!r} with {num_ranks} ranks",
                "'auto', or one that several ranks can use:"
                f" {', '.join(map(repr, names_for_ranks()))}",
                "--set embedding.exchange=auto",
            )
        return self

    def options(self, workers: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Options of the exchange.

        ``workers`` are the processes beside the trainers, by the command that starts them.
        """
        return self.model_dump(exclude={"name"})

    def helpers(self) -> dict[str, int]:
        """How many processes it wants beside the trainers, by the command that starts them."""
        return {}

    def duties(self) -> dict[str, str]:
        """What is done beside training, by the same commands.

        The trainers do it themselves where no process is wanted for it.
        """
        return {}

    def helper_rendezvous(self) -> str | None:
        """Where these processes are met if they run already."""
        return None

    def placed(self) -> str:
        """How rows lie on ranks or servers, in a word or two; empty where one process has all."""
        return ""


class PlacedSection(ExchangeSection):
    """Settings of exchanges that put rows on several ranks, and send rows and gradients.

    Attributes:
        placement: which rank holds what, see :mod:`pibroch.planner.plan`: a kind for all tables, or
            kinds by table (``""`` for those not named).
        plan: a file that says it instead.
        wire: the type in which rows and their gradients travel; ``float32`` is exact.
        compress: whether all of it travels compressed: the same numbers in a sixth fewer bytes, for
            some CPU.
    """

    placement: PlacementKind | dict[str, PlacementKind] = "row_wise"
    plan: str | None = None
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    compress: bool = False

    @model_validator(mode="after")
    def _placed_once(self) -> Self:
        if self.plan is not None and self.placement != "row_wise":
            raise ValueError("takes `placement` or `plan`, not both")
        return self

    @field_validator("placement", mode="after")
    @classmethod
    def _possible(cls, value: object, info: ValidationInfo) -> object:
        kinds = set(value.values()) if isinstance(value, dict) else {value}
        allowed = PLACEMENTS
        if "name" in info.data:
            allowed = find_exchange(info.data["name"]).placements
        if not kinds.issubset(allowed):
            raise ValueError(
                f"{' or '.join(allowed)} with `embedding.exchange = {info.data['name']!r}`"
            )
        return value

    def placed(self) -> str:
        """See :class:`ExchangeSection`."""
        return str(self.plan or self.placement)


def names_for_ranks() -> list[str]:
    """Those that several ranks can use."""
    return [
        name for name, spec in exchanges().items() if spec.most_ranks is None and name != "auto"
    ]
