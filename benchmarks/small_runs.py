"""Commands of pibroch as users give them, and the recipe of a small DLRM that they train."""

from __future__ import annotations

import subprocess

from benchmarks.contender import BenchmarkError
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
