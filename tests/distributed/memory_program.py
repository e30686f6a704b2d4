"""One rank that trains DLRM on generated ids, and prints what memory its process took.

``python memory_program.py RANK SIZE STORE EXCHANGE``
"""

import json
import re
import sys
from functools import partial
from pathlib import Path

from pibroch.process import tune_process

FEATURES = 26
NAMES = [f"C{number}" for number in range(FEATURES)]
NUM_DENSE = 13
ROWS = 60_000
DIM = 32
BATCH_SIZE = 1024
LOOKAHEAD = 20
STEPS = 30
RANKS = 2


def tables():
    import pibroch as pb

    return [pb.Table(name, ROWS, DIM) for name in NAMES]


def model():
    from pibroch.models import build_model

    return build_model("dlrm", NUM_DENSE, FEATURES, dim=DIM, bottom=(512, 256), top=(512, 256))


def batch_of(step, rank):
    """One skewed id a feature."""
    import numpy as np
    import torch

    import pibroch as pb

    ids = np.random.default_rng([step, rank]).zipf(1.2, (FEATURES, BATCH_SIZE)) % ROWS
    dense = torch.rand(BATCH_SIZE, NUM_DENSE)
    return pb.JaggedBatch.from_one_hot(dense, NAMES, torch.from_numpy(ids), torch.zeros(BATCH_SIZE))


def main(rank, size, store, exchange):
    import torch
    import torch.distributed as dist

    import pibroch as pb
    from pibroch.observability.memory import rss_bytes
    from pibroch.train import session  # noqa: F401  as a run does

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    imports = rss_bytes()
    options = {"lookahead": LOOKAHEAD} if exchange == "lookahead" else {}
    embeddings = pb.Embeddings(tables(), pb.RowWiseAdagrad(lr=0.1), exchange, seed=1, **options)
    dense = pb.data_parallel(model())
    optimizer = torch.optim.Adam(dense.parameters())
    loss_of = torch.nn.BCEWithLogitsLoss()
    for batch in embeddings.feed(batch_of(step, rank) for step in range(STEPS)):
        optimizer.zero_grad()
        loss_of(dense(batch.dense, partial(embeddings, batch)), batch.labels).backward()
        optimizer.step()
    embeddings.exchange.flush()
    print(json.dumps({"imports": imports, "peak": peak_bytes()}))


def peak_bytes():
    """Of this program alone: what rusage tells has the most before it was executed in it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) << 10


if __name__ == "__main__":
    tune_process(False)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
