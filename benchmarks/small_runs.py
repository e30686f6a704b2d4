"""Whole runs: commands of pibroch as users give them, and peers' workers.

With the recipe of a small DLRM that several topics train.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.contender import CHECKOUT, BenchmarkError
from benchmarks.environments import our_python

BATCH = 2048
RECIPE = f"""
[model]
name = "dlrm"
dim = 16
bottom = [64]
top = [64]
[embedding.optimizer]
name = "rowwise_adagrad"
lr = 0.05
[optimizer]
name = "adam"
lr = 1e-3
[train]
batch_size = {BATCH}
log_every = 1
keep = 1
evaluate_every = 1_000_000
"""


def settings(*given: str) -> list[str]:
    """As the command line takes them."""
    return [word for each in given for word in ("--set", each)]


def pibroch(*words: object, timeout_s: float = 1800) -> None:
    """Run a command to its end.

    Raises:
        BenchmarkError: when it fails.
    """
    command = [str(our_python()), "-m", "pibroch", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{words[0]}: {done.stderr[-2000:]}")


def peer(name: str, python: Path, worker: str, *words: object, timeout_s: float) -> dict[str, Any]:
    """Run a worker of a peer to its end; the figures that it prints as JSON, in its last line.

    Raises:
        BenchmarkError: when it fails.
    """
    done = subprocess.run(
        [str(python), "-W", "ignore", "-m", f"benchmarks.workers.{worker}", *map(str, words)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{name}: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
