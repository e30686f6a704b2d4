"""Which exchanges there are: what each is called, what it can be told, and where it is built.

An exchange is a package whose ``__init__`` holds an :class:`ExchangeSpec` named ``SPEC`` and the
section that recipes have for it, and imports nothing but :mod:`pibroch.config`; the rest of it
loads when it is chosen. Packages of others are found by the entry point ``pibroch.exchanges``.
``docs/extending.md`` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Literal, Self, get_args

from pydantic import ValidationInfo, field_validator, model_validator

from pibroch.config.base import Section
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
"""Words up to which ranks name the copied rows of one owner by a bit each without saying first how many they are."""
ENTRY_POINTS = "pibroch.exchanges"
"""Of other distributions: names of packages that have a ``SPEC``."""


class ExchangeSection(Section):
    """The ``[embedding.exchange]`` table of a recipe, as each exchange extends it by its own settings."""

    name: str

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
        """What the exchange is told.

        ``workers`` are the processes beside the trainers, by the command that starts them.
        """
        return self.model_dump(exclude={"name"})

    def helpers(self) -> dict[str, int]:
        """How many processes it wants beside the trainers, by the command that starts them."""
        return {}

    def duties(self) -> dict[str, str]:
        """What is done beside training, by the same commands.

        By the trainers themselves where no process is wanted for it.
        """
        return {}

    def helper_rendezvous(self) -> str | None:
        """Where these processes are met if they run already."""
        return None

    def placed(self) -> str:
        """How rows lie on ranks or servers, in a word or two; empty where one process has them all."""
        return ""


class PlacedSection(ExchangeSection):
    """Settings of exchanges that put rows on several ranks, and send rows and gradients between them.

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
        known = find_exchange(info.data["name"]).placements if "name" in info.data else PLACEMENTS
        if not kinds.issubset(known):
            raise ValueError(
                f"{' or '.join(known)} with `embedding.exchange = {info.data['name']!r}`"
            )
        return value

    def placed(self) -> str:
        """See :class:`ExchangeSection`."""
        return str(self.plan or self.placement)


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange, before it is loaded.

    Attributes:
        name: by which users choose it.
        summary: what it does, in a line.
        section: its settings in a recipe.
        factory: makes it of a :class:`pibroch.exchange.base.Setup` and its options by name: a
            callable, or ``module:attribute``, which is imported when the exchange is chosen.
        placements: kinds of placement that it takes, see :mod:`pibroch.planner.plan`; none where
            one process has all rows.
        most_ranks: that can use it; ``None`` for any number.
    """

    name: str
    summary: str
    section: type[ExchangeSection]
    factory: str | Callable[..., Any]
    placements: tuple[str, ...] = ()
    most_ranks: int | None = None

    def build(self, *args: object, **options: object) -> Any:
        """The exchange."""
        if not isinstance(self.factory, str):
            return self.factory(*args, **options)
        module, _, attribute = self.factory.partition(":")
        return attrgetter(attribute)(import_module(module))(*args, **options)


_registered: dict[str, ExchangeSpec] = {}


def register_exchange(spec: ExchangeSpec) -> None:
    """Make an exchange known to this process.

    For recipes its package has an entry point ``pibroch.exchanges`` instead.

    Raises:
        ConfigError: when another one has its name.
    """
    if exchanges().get(spec.name, spec) != spec:
        raise ConfigError(f"a second exchange {spec.name!r}", "a name of its own")
    _registered[spec.name] = spec


def find_exchange(name: str) -> ExchangeSpec:
    """The exchange of that name.

    Raises:
        ConfigError: when there is none.
    """
    found = _built_in().get(name) or exchanges().get(name)
    if found is None:
        raise ConfigError(f"exchange {name!r}", f"one of {sorted(exchanges())}")
    return found


def exchanges() -> dict[str, ExchangeSpec]:
    """All that this process knows, by name."""
    return {**_built_in(), **_installed(), **_registered}


def names_for_ranks() -> list[str]:
    """Those that several ranks can use."""
    return [
        name for name, spec in exchanges().items() if spec.most_ranks is None and name != "auto"
    ]


@lru_cache(maxsize=1)
def _built_in() -> dict[str, ExchangeSpec]:
    return {name: import_module(f"pibroch.exchange.{name}").SPEC for name in BUILT_IN}


@lru_cache(maxsize=1)
def _installed() -> dict[str, ExchangeSpec]:
    specs = [import_module(point.value).SPEC for point in entry_points(group=ENTRY_POINTS)]
    return {spec.name: spec for spec in specs}
