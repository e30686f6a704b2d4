"""The worker's half of the protocol: one JSON command a line in, one JSON answer a line out.

Commands: ``setup`` (a case), ``check`` (steps whose numbers must agree between contenders), ``run``
(timed steps), ``memory``, ``count`` (what the subject counts of its own). Between commands the
process blocks in ``readline``, so an idle contender costs the running one nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from benchmarks.cases import Case
from benchmarks.workers.memory import give_back_freed, peak_rss_bytes, reset_peak_rss, rss_bytes


class Subject(Protocol):
    """One contender holding one case."""

    def phases(self) -> dict[str, Callable[[int], object]]:
        """What can be timed: name to a function of the batch's number."""

    def check(self, steps: int) -> dict[str, list[float]]:
        """Series that every contender must produce alike; changes the state as training does."""

    def versions(self) -> dict[str, str]:
        """Packages that matter for this contender's speed."""


Build = Callable[[Case], Subject]


class Counting(Protocol):
    """A contender that counts, bytes by purpose for instance."""

    def counts(self) -> dict[str, float]:
        """Everything that was counted since the set-up, by name."""


class Telling(Protocol):
    """A contender that has more to say of a step than its time."""

    def tell(self) -> dict[str, float]:
        """Figures of the last step, by name."""


class Session:
    """State between commands: the subject and the memory before it was built."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._subject: Subject | None = None
        self._baseline_bytes = 0

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        kind = command["do"]
        if kind == "setup":
            return self._setup(Case(**command["case"]))
        if kind == "memory":
            now = rss_bytes()  # before the peak, which is no less then
            return {"baseline": self._baseline_bytes, "peak": peak_rss_bytes(), "now": now}
        assert self._subject is not None, "setup comes first"
        if kind == "count":
            counting: Counting = self._subject  # type: ignore[assignment]
            return {"counts": counting.counts()}
        if kind == "check":
            values = self._subject.check(command["steps"])
            give_back_freed()  # the check's own copies are not the contender's memory
            reset_peak_rss()
            return {"values": values}
        telling = getattr(self._subject, "tell", dict)
        return _timed(
            self._subject.phases()[command["phase"]], command["first"], command["steps"], telling
        )

    def _setup(self, case: Case) -> dict[str, Any]:
        self._subject = None
        self._baseline_bytes = rss_bytes()
        reset_peak_rss()
        self._subject = self._build(case)
        return {"versions": self._subject.versions()}


def _timed(
    step: Callable[[int], object], first: int, steps: int, tell: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Wall milliseconds of each step, CPU milliseconds of all threads a step, and notes."""
    times_ms = []
    reported = []
    cpu_start = time.process_time()
    tell()
    for batch in range(first, first + steps):
        start = time.perf_counter()
        step(batch)
        times_ms.append((time.perf_counter() - start) * 1e3)
        reported.append(tell())
    cpu_ms = (time.process_time() - cpu_start) * 1e3
    names = dict.fromkeys(name for each in reported for name in each)
    figures = {name: [each.get(name, 0.0) for each in reported] for name in names}
    return {"step_ms": times_ms, "cpu_ms_per_step": cpu_ms / steps, "figures": figures}


def serve(load: Callable[[], Build]) -> None:
    """Answer commands until standard input closes; what libraries print goes to standard error."""
    answers = _private_stdout()
    try:
        session = Session(load())
        _send(answers, {"ready": os.getpid()})
    except Exception:
        _send(answers, {"error": traceback.format_exc()})
        return
    for line in sys.stdin:
        try:
            _send(answers, session.answer(json.loads(line)))
        except Exception:
            _send(answers, {"error": traceback.format_exc()})


def _private_stdout() -> TextIO:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _send(channel: TextIO, answer: dict[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()
