"""One of two ranks that train a dense layer, and prints the digest of its weights.

``python rounding_program.py RANK STORE``
"""

import hashlib
import logging
import sys

import torch
import torch.distributed as dist
from torch import nn

from pibroch.collectives import data_parallel

STEPS = 20


def main():
    rank, store = int(sys.argv[1]), sys.argv[2]
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = data_parallel(nn.Linear(64, 32))
    data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    print(hashlib.sha256(model.weight.detach().numpy()).hexdigest())


if __name__ == "__main__":
    main()
