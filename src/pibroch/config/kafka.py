"""Settings of librdkafka that a recipe may have, and those that pibroch has to decide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import BeforeValidator

from pibroch.config.secret import Secret, is_secret

KafkaSettings = Mapping[str, str | int | float | bool | Secret]
FIXED: dict[str, str | bool] = {
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "group.id": "pibroch",  # has to be there; nothing is committed
    "isolation.level": "read_committed",
}
"""What positions, their ends, and that each event is trained once, rest on."""
_PLACES = ("bootstrap.servers", "metadata.broker.list")
_OTHERS = re.compile(
    r"group\.|auto\.commit\.|offset\.store\.|share\.|test\.|partition\.assignment\.strategy$"
    r"|session\.timeout\.ms$|heartbeat\.interval\.ms$|max\.poll\.|coordinator\.query\."
    r"|consume\.callback\.|topic\.blacklist$|log\.queue$|enabled_events$|interceptors$"
    r"|plugin\.library\.paths$|default.topic.conf|opaque$|logger$|.*_cb(_data)?$"
)
"""Of groups and commits, which there are none of, and what reaches into the program."""


def check_settings(settings: KafkaSettings) -> None:
    """Refuse what would take from a stream that it is exact.

    A setting that says what holds anyway is none of those.

    Raises:
        ValueError: names it.
    """
    for name, value in settings.items():
        if name in _PLACES:
            raise ValueError(f"takes no `{name}`: say `brokers` in [data.stream]")
        if name in FIXED and str(value).lower() != str(FIXED[name]).lower():
            raise ValueError(
                f"takes no `{name} = {value!r}`: it is {FIXED[name]!r}, so that each event is"
                " trained once"
            )
        if name not in FIXED and _OTHERS.match(name):
            raise ValueError(
                f"takes no `{name}`: positions are the run's own, without groups and commits"
            )


def _flat(settings: object) -> object:
    """Dotted keys, which TOML makes tables of, as names again; secrets by reference.

    >>> _flat({"sasl": {"username": "u", "password": {"env": "P"}}})
    {'sasl.username': 'u', 'sasl.password': {'env': 'P'}}
    """
    return dict(_settings(settings, "")) if isinstance(settings, Mapping) else settings


def _settings(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if value.keys() <= Secret.model_fields.keys():
                yield name, value
            else:
                yield from _settings(value, f"{name}.")
        elif is_secret(name) and isinstance(value, str | int | float):
            yield name, Secret.given(f"kafka.{name}", str(value))
        else:
            yield name, value


SettingsOfRecipe = Annotated[dict[str, str | int | float | bool | Secret], BeforeValidator(_flat)]
