"""Topics by name.

A topic is one file under ``benchmarks/topics`` that decorates its entry point with ``topic``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
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
        section: the part to measure, of a topic that has sections.
    """

    quick: bool
    scratch: Path
    say: Callable[[str], None]
    section: str = ""


@dataclass(frozen=True, slots=True)
class Topic:
    """A registered benchmark.

    Attributes:
        name: on the command line.
        summary: one line.
        run: measures; a section of it, where there are sections.
        sections: parts that are measured and written each for itself, in this order; none for most
            topics.
        quick_sections: those that a quick run takes when none is named.
    """

    name: str
    summary: str
    run: Callable[[Options], Report]
    sections: tuple[str, ...] = ()
    quick_sections: tuple[str, ...] = ()

    def chosen(self, only: Sequence[str], quick: bool) -> tuple[str, ...]:
        """The sections to measure, in their order; those named in ``only``, if any are.

        Raises:
            ConfigError: for a name that is no section.
        """
        unknown = [name for name in only if name not in self.sections]
        if unknown:
            names = (
                f"one of {', '.join(self.sections)}"
                if self.sections
                else "none: this topic has no sections"
            )
            raise ConfigError(f"section {unknown[0]!r} of benchmark {self.name!r}", names)
        wanted = only or (self.quick_sections if quick else self.sections)
        return tuple(name for name in self.sections if name in wanted)


_topics: dict[str, Topic] = {}


def topic(
    name: str, summary: str, sections: Sequence[str] = (), quick_sections: Sequence[str] = ()
) -> Callable[[Callable[[Options], Report]], Callable[[Options], Report]]:
    """Register a function as the topic ``name``."""

    def register(run: Callable[[Options], Report]) -> Callable[[Options], Report]:
        assert name not in _topics, f"two topics named {name}"
        _topics[name] = Topic(name, summary, run, tuple(sections), tuple(quick_sections))
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
    all_topics = topics()
    if name not in all_topics:
        raise ConfigError(
            f"benchmark {name!r}", f"one of {', '.join(all_topics)}", "see `pibroch bench`"
        )
    return all_topics[name]
