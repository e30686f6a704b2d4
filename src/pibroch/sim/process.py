"""What a rank's process takes without rows: imports, then libraries and kernels that have run.

``python -m pibroch.sim.process`` prints both, of a process that has done nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

from pibroch.errors import PibrochError
from pibroch.process import tune_process

TIMEOUT_S = 300.0  # kernels may have to be compiled
TABLES = 4
ROWS = 100
DIM = 16
SAMPLES = 8


class ProcessBytes(NamedTuple):
    """Resident memory.

    Attributes:
        imports: of a process that has imported what training needs.
        running: what is added once each exchange and a dense model have made a small step.
    """

    imports: int
    running: int


@cache
def process_bytes() -> ProcessBytes:
    """Measure a new process, once; takes seconds.

    Raises:
        PibrochError: when it fails.
    """
    command = [sys.executable, "-m", "pibroch.sim.process"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if run.returncode:
        raise PibrochError(
            f"a process that ended with {run.returncode}: {run.stderr[-500:]}",
            "a small step of each exchange in it",
        )
    return ProcessBytes(**json.loads(run.stdout))


def main() -> None:
    """Make small steps, and print :class:`ProcessBytes`."""
    tune_process(is_alone=False)  # as a run does
    import torch

    from pibroch.data import JaggedBatch
    from pibroch.embedding import RowWiseAdagrad, Table, group_tables
    from pibroch.models import build_model
    from pibroch.observability.memory import rss_bytes
    from pibroch.planner import Plan
    from pibroch.sim.counting import Job, count
    from pibroch.sim.measuring import EXCHANGES
    from pibroch.train import session  # noqa: F401  as a run does

    torch.set_num_threads(1)
    imports = rss_bytes()
    names = [f"C{number}" for number in range(TABLES)]
    tables = [Table(name, ROWS, DIM) for name in names]

    def batch_of(step: int, rank: int) -> JaggedBatch:
        ids = (torch.arange(TABLES * SAMPLES).reshape(TABLES, SAMPLES) + step + rank) % ROWS
        return JaggedBatch.from_one_hot(torch.zeros(SAMPLES, 1), names, ids, torch.zeros(SAMPLES))

    job = Job(group_tables(tables, RowWiseAdagrad(lr=0.1)), Plan.of(tables, 2), batch_of, seed=1)
    for exchange in EXCHANGES:
        count(job.under(exchange), 2, 2)
    model = build_model("dlrm", 1, TABLES, dim=DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    embedded = torch.zeros(SAMPLES, TABLES, DIM, requires_grad=True)
    model(torch.zeros(SAMPLES, 1), embedded).sum().backward()
    optimizer.step()
    print(json.dumps({"imports": imports, "running": rss_bytes() - imports}))


if __name__ == "__main__":
    main()
