"""TorchRec's managed collisions: what it takes to find the rows of a batch of raw ids.

Run by the peers' Python: ``ROWS STEPS``; prints its figures as JSON. FBGEMM's hash table, which
``HashZchManagedCollisionModule`` has, learns on GPUs alone: on CPUs it wants to be read only.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from torchrec import JaggedTensor
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule

from benchmarks.raw_id_stream import BATCH_IDS, NEW_IDS, Stream

EVERY = 10
"""Steps between two evictions."""
FEATURE = "ids"


def main() -> None:
    """Fill the table, then time steps."""
    num_rows, steps = map(int, sys.argv[1:])
    logging.disable()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    module = MCHManagedCollisionModule(num_rows, device, DistanceLFU_EvictionPolicy(), EVERY)
    stream = Stream(0)
    offsets = torch.tensor([0, BATCH_IDS])

    def learn(ids: torch.Tensor) -> torch.Tensor:
        feature = {FEATURE: JaggedTensor(ids, offsets=offsets)}
        rows = module.remap(module.profile(module.preprocess(feature)))[FEATURE].values()
        module.evict()
        return rows

    for _ in range(num_rows // NEW_IDS + EVERY):
        learn(torch.from_numpy(stream.batch()))
    taken = []
    shared = 0
    for _ in range(steps):
        ids = torch.from_numpy(stream.batch())
        begin = time.perf_counter_ns()
        rows = learn(ids)
        taken.append((time.perf_counter_ns() - begin) / BATCH_IDS)
        shared += len(ids.unique()) - len(rows.unique())
    print(
        json.dumps(
            {
                "mean_ns": float(np.mean(taken)),
                "p50_ns": float(np.percentile(taken, 50)),
                "p80_ns": float(np.percentile(taken, 80)),
                "longest_ms": max(taken) * BATCH_IDS / 1e6,
                "bytes_per_row": sum(each.nbytes for each in module.state_dict().values())
                / num_rows,
                "shared_rows": shared / steps,
                "versions": {name: version(name) for name in ("torchrec", "fbgemm_gpu-cpu")},
            }
        )
    )


if __name__ == "__main__":
    main()
