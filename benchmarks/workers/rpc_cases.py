"""A process of topic ``rpc_cases``.

The last rank drives the four cases, the others do what it asks of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workers.rpc_case_dlrm import ParameterServer
from benchmarks.workers.rpc_case_federated import FederatedAveraging
from benchmarks.workers.rpc_case_pipeline import Pipeline
from benchmarks.workers.rpc_case_rl import ReinforcementLearning
from benchmarks.workers.rpc_case_sizes import sizes
from benchmarks.workers.rpc_library import rpc

CASES: dict[str, Any] = {
    "rl": ReinforcementLearning,
    "pipeline": Pipeline,
    "parameter_server": ParameterServer,
    "federated": FederatedAveraging,
}


class Driver:
    """See :class:`benchmarks.workers.serving.Subject`.

    A process that does not drive has nothing to time.
    """

    def __init__(self, names: list[str], drives: bool) -> None:
        chosen = sizes(quick=False)
        self._cases = {name: made(names, chosen) for name, made in CASES.items()} if drives else {}

    def phases(self) -> dict[str, Callable[[int], object]]:
        """A step of each case."""
        return {name: case.step for name, case in self._cases.items()}

    def check(self, steps: int) -> dict[str, list[float]]:
        """The losses of the first steps."""
        return {
            f"loss {name}": [case.step(step) for step in range(steps)]
            for name, case in self._cases.items()
        }

    def versions(self) -> dict[str, str]:
        """See :class:`benchmarks.workers.serving.Subject`."""
        return {"torch": torch.__version__}


def join(options: Any) -> Driver:
    """Join as the rank that the environment tells."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    names = [f"worker{place}" for place in range(size - 1)]
    rpc.init_rpc([*names, "driver"][rank], rank=rank, world_size=size, rpc_backend_options=options)
    return Driver(names, rank == size - 1)
