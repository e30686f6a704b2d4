"""Where a number comes from: command, code, machine, date."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
GIT_TIMEOUT_S = 10


def provenance() -> dict[str, str]:
    """Name to value, ready to print."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": _command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "hardware": (
            f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory_bytes / 2**30:.0f} GiB"
        ),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def _command() -> str:
    """As it was given, but for ``--out``: where its files went says nothing about them."""
    program = Path(sys.argv[0]).name
    words = ["pibroch" if program == "__main__.py" else program, *sys.argv[1:]]
    kept = [word for word, before in zip(words, ["", *words], strict=False) if before != "--out"]
    return shlex.join(word for word in kept if word != "--out" and not word.startswith("--out="))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Short hash, with ``-dirty`` when files differ from it, results left out.

    ``unknown`` outside git.
    """
    output = _git("rev-parse", "--short", "HEAD")
    if output is None:
        return "unknown"
    return f"{output.strip()}-dirty" if changes() else output.strip()


def changes() -> list[str]:
    """Files that differ from the commit or are not in it, but for ignored ones and results.

    These are what is being made.
    """
    output = _git("status", "--porcelain", "--", ".", ":!benchmarks/results") or ""
    return [line[3:] for line in output.splitlines()]


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
