"""A program that predicts without end over bounded lag, as its users write it.

The tests kill or stop one of its ranks.
"""

import os
import sys
import time

import pipeline_cases as cases
import torch
import torch.distributed as dist

import pibroch as pb
from pibroch.collectives import Ranks
from pibroch.collectives.bounded_lag import losses

rank = int(os.environ["RANK"])
bound = int(sys.argv[1])
transport = sys.argv[2]
num_batches = int(sys.argv[3])
if len(sys.argv) > 4:
    losses.STOPPED_S = float(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("bls", pg_options=pb.BoundedLagOptions(bound=bound, transport=transport))
channel = Ranks.joined(60.0).open_channel()
model, embeddings = cases.make(channel, "mixed")
pipeline = pb.BoundedLagPipeline(model, embeddings, bound, transport)
for number in range(20):
    pipeline.submit(cases.make_batch(rank, number % 4))
print("running", os.getpid(), flush=True)
start = time.monotonic()
try:
    for number in range(num_batches):
        start = time.monotonic()
        pipeline.submit(cases.make_batch(rank, number % 4))
    pipeline.drain()
except pb.errors.RankFailedError as error:
    print(f"named {error.rank} after {time.monotonic() - start:.2f}", flush=True)
    time.sleep(float(os.environ.get("LINGER_S", "0")))
    sys.exit(3)
print("done", flush=True)  # and no goodbye: not every program says one
