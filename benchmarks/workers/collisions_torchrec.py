"""TorchRec's managed collisions: what it takes to find the rows of a batch of raw ids.

Run by the peers' Python: ``KIND ROWS STEPS``; prints its figures as JSON.
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
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

from benchmarks.raw_id_stream import BATCH_IDS, NEW_IDS, Stream

EVERY = 10
"""Steps between two evictions of sorted ids."""
FEATURE = "ids"
MOST = np.iinfo(np.int64).max  # FBGEMM's hash table keeps negative numbers for itself


def module_of(kind: str, num_rows: int) -> ManagedCollisionModule:
    """``sorted`` for binary search among sorted ids, ``probed`` for FBGEMM's hash table."""
    device = torch.device("cpu")
    if kind == "sorted":
        return MCHManagedCollisionModule(num_rows, device, DistanceLFU_EvictionPolicy(), EVERY)
    return HashZchManagedCollisionModule(
        num_rows,
        device,
        total_num_buckets=1,
        name=FEATURE,
        eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION,
        eviction_config=HashZchEvictionConfig(features=[FEATURE], single_ttl=1),
    )


def main() -> None:
    """Fill the table, then time steps."""
    kind, num_rows, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.disable()
    torch.set_num_threads(1)
    module = module_of(kind, num_rows)
    stream = Stream(0)
    offsets = torch.tensor([0, BATCH_IDS])

    def batch() -> torch.Tensor:
        return torch.from_numpy(stream.batch() & MOST)

    def learn(ids: torch.Tensor) -> torch.Tensor:
        feature = {FEATURE: JaggedTensor(ids, offsets=offsets)}
        rows = module.remap(module.profile(module.preprocess(feature)))[FEATURE].values()
        module.evict()
        return rows

    for _ in range(num_rows // NEW_IDS + EVERY):
        learn(batch())
    taken = []
    shared = 0
    for _ in range(steps):
        ids = batch()
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
