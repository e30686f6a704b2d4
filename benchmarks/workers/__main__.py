"""Start one contender: ``python -m benchmarks.workers MODULE[:FUNCTION]``.

It serves commands until standard input closes.
"""

from __future__ import annotations

import importlib
import sys

from benchmarks.workers.serving import Build, serve

# As `pibroch train` does, before torch is imported; peers run as their users run them.
if sys.argv[1].partition(":")[0].endswith("pibroch"):
    from pibroch.process import tune_process

    tune_process()


def load() -> Build:
    module, _, function = sys.argv[1].partition(":")
    build: Build = getattr(
        importlib.import_module(f"benchmarks.workers.{module}"), function or "build"
    )
    return build


if __name__ == "__main__":
    serve(load)
