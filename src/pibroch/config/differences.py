"""In which settings two configurations differ, by the keys of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pibroch.config.run import RunConfig


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[object, object]]:
    """Keys whose values differ, with both values.

    ``None`` for one that a configuration does not have.

    >>> before = RunConfig.model_validate({"data": {"dir": "x"}, "train": {"epochs": 1}})
    >>> differences(before, before.model_copy(update={"seed": 2}))
    {'seed': (1, 2)}
    """
    old, new = (settings(config.model_dump(mode="json")) for config in (before, after))
    return {
        key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)
    }


def spelled(changes: Mapping[str, object]) -> str:
    """Settings as a recipe spells them, for messages.

    >>> spelled({"seed": 2, "model.name": "dlrm"})
    "`seed = 2`, `model.name = 'dlrm'`"
    """
    return ", ".join(
        f"no `{key}`" if value is None else f"`{key} = {value!r}`" for key, value in changes.items()
    )


def settings(table: Mapping[str, object]) -> dict[str, object]:
    """Nested tables as one, by the keys of a recipe.

    >>> settings({"seed": 2, "model": {"name": "dlrm"}})
    {'seed': 2, 'model.name': 'dlrm'}
    """
    return dict(_settings(table, ""))


def _settings(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
