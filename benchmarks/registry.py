"""Topics by name. A topic is one file under ``benchmarks/topics`` that decorates its entry point with ``topic``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Report
from pibroch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """What a topic is asked to do.

    Attributes:
        quick: finish within a minute on two quiet cores.
        scratch: folder for the batches, removed afterwards.
        say: told in a few words what happens, for a progress display.
    """

    quick: bool
    scratch: Path
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Topic:
    """A registered benchmark."""

    name: str
    summary: str
    run: Callable[[Options], Report]


_topics: dict[str, Topic] = {}


def topic(name: str, summary: str) -> Callable[[Callable[[Options], Report]], Callable[[Options], Report]]:
    """Register a function as the topic ``name``."""

    def register(run: Callable[[Options], Report]) -> Callable[[Options], Report]:
        assert name not in _topics, f"two topics named {name}"
        _topics[name] = Topic(name, summary, run)
        return run

    return register


def topics() -> dict[str, Topic]:
    """All topics by name, in alphabetical order."""
    package = importlib.import_module("benchmarks.topics")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"benchmarks.topics.{module.name}")
    return dict(sorted(_topics.items()))


def find_topic(name: str) -> Topic:
    """The topic ``name``.

    Raises:
        ConfigError: when there is none.
    """
    known = topics()
    if name not in known:
        raise ConfigError(f"benchmark {name!r}", f"one of {', '.join(known)}", "see `pibroch bench`")
    return known[name]
