"""All results of one commit: every section of every topic in turn, each in a process of its own.

A section that fails keeps its old files, and the others are measured all the same. Given again at
the same commit, the command leaves out what it has measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import provenance
from benchmarks.registry import find_topic, topics
from pibroch.errors import ConfigError

RESULTS = provenance.CHECKOUT / "benchmarks" / "results"


def measure_all(skip: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Measure what is not there at this commit.

    Args:
        skip: topics to leave out.
        say: told what happens.

    Returns:
        The sections that failed, as ``topic`` or ``topic/section``.

    Raises:
        ConfigError: for a topic that is none, or a checkout that differs from its commit.
    """
    for name in skip:
        find_topic(name)
    commit = _clean_commit()
    sections = [
        (name, section)
        for name, topic in topics().items()
        if name not in skip
        for section in topic.sections or ("",)
    ]
    missing = [each for each in sections if measured_at(RESULTS.joinpath(*each)) != commit]
    say(f"commit {commit}: {len(missing)} of {len(sections)} sections to measure")
    failed = []
    for number, (name, section) in enumerate(missing, start=1):
        label = f"{name}/{section}" if section else name
        say(f"[{number}/{len(missing)}] {label}")
        started = time.monotonic()
        only = ["--only", section] if section else []
        command = [sys.executable, "-m", "pibroch", "bench", name, *only]
        code = subprocess.run(command, cwd=provenance.CHECKOUT, check=False).returncode
        outcome = f"failed with exit code {code}" if code else "measured"
        if not code and measured_at(RESULTS.joinpath(name, section)) != commit:
            outcome = "measured, but not at this commit: the checkout was changed meanwhile"
        if outcome != "measured":
            failed.append(label)
        say(
            f"[{number}/{len(missing)}] {label}: {outcome} after {time.monotonic() - started:.0f} s"
        )
    say(f"failed: {', '.join(failed)}" if failed else "all are measured")
    return failed


def measured_at(folder: Path) -> str | None:
    """The commit of the result in a folder, ``None`` where there is none."""
    origin = folder / "origin.json"
    return json.loads(origin.read_text("utf-8")).get("commit") if origin.is_file() else None


def _clean_commit() -> str:
    commit = provenance.commit()
    changed = provenance.changes()
    if changed or commit == "unknown":
        got = f"changes in {', '.join(changed[:5])}" if changed else "no commit"
        raise ConfigError(got, "a checkout that is what its commit says", "commit, or stash them")
    return commit
