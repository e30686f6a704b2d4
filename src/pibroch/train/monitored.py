"""Which figure of an evaluation says which model is best: ``train.monitor``."""

from __future__ import annotations

from collections.abc import Mapping

from pibroch.config import RunConfig
from pibroch.data.schema import Schema
from pibroch.errors import ConfigError
from pibroch.observability.records import UNWEIGHTED

_LOWER_IS_BETTER = frozenset(("logloss", "normalized_entropy", "rmse", "mae"))
_OF_CLICKS = ("auc", "logloss", "normalized_entropy", "pr_auc")
_OF_NUMBERS = ("rmse", "mae")


def monitored(monitor: str, schema: Schema) -> tuple[str, str]:
    """The label and the name of the figure in ``NAME`` or ``LABEL:NAME``."""
    label, _, figure = monitor.rpartition(":")
    return label or schema.label_columns[0], figure


def is_lower_better(figure: str) -> bool:
    """Whether a figure of this name is a loss."""
    return figure.removesuffix(UNWEIGHTED) in _LOWER_IS_BETTER


def is_over_all_items(config: RunConfig, schema: Schema) -> bool:
    """Whether it is a figure that costs a search among all items."""
    return monitored(config.train.monitor, schema)[1].startswith("all_")


def check_groups(schema: Schema) -> None:
    """Raise ConfigError for data of which nobody can say what a user had before."""
    if schema.group is None:
        raise ConfigError(
            "train.leave_out_seen with data that have no groups",
            "a column that says whose a sample is",
            'say group = "user" in the schema, and prepare the data again',
        )


def check_monitor(config: RunConfig, schema: Schema) -> None:
    """Raise ConfigError unless evaluations have this figure."""
    settings = config.train
    if settings.leave_out_seen:
        check_groups(schema)
    label, figure = monitored(settings.monitor, schema)
    if label not in schema.targets:
        raise ConfigError(
            f"train.monitor = {settings.monitor!r}",
            f"a label of the data before the colon, one of {', '.join(schema.targets)}",
        )
    names = list(_OF_NUMBERS)
    if schema.targets[label].kind == "binary":
        names = list(_OF_CLICKS)
        if schema.group is not None:
            of_k = [f"{name}@{k}" for name in ("ndcg", "hr") for k in settings.top_k]
            names += ["gauc", *of_k]
        if config.loss.name == "in_batch_softmax":
            names += [f"all_{name}@{k}" for name in ("ndcg", "hr") for k in settings.top_k]
    if schema.weight is not None:
        names += [f"{name}{UNWEIGHTED}" for name in names if not name.startswith("all_")]
    if figure not in names:
        others = "" if len(schema.targets) == 1 else ", or one of another label as LABEL:NAME"
        raise ConfigError(
            f"train.monitor = {settings.monitor!r} for the label {label!r}",
            f"one of {', '.join(names)}{others}",
            f"pass --set train.monitor={names[0]}",
        )


def value_of(monitor: str, tasks: Mapping[str, Mapping[str, float]], schema: Schema) -> float:
    """The figure, with its sign changed where lower is better."""
    label, figure = monitored(monitor, schema)
    value = tasks[label][figure]
    return -value if is_lower_better(figure) else value
