"""Rank 1 dies while rank 0 waits, in a collective, for rank 2, which does something else."""

import os
import sys
import time

import torch
import torch.distributed as dist

from pibroch.cli.console import leave_with
from pibroch.collectives import failure_detector
from pibroch.collectives.world import world_of_environment

failure_detector.STUCK_S = 0.5
with world_of_environment(leave_with) as world:
    world.enter(3)
    world.control.barrier()
    if world.ranks.rank == 0:
        print("waits", flush=True)
        dist.recv(torch.empty(1), 2)
    elif world.ranks.rank == 1:
        sys.stdin.readline()
        os._exit(9)
    else:
        time.sleep(300)
