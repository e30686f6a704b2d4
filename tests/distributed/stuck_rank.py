"""Rank 1 dies while rank 0 waits, in a collective, for rank 2, which lives and does something else."""

import os
import sys
import time

import torch
import torch.distributed as dist

from pibroch.cli.console import leave_with
from pibroch.collectives import watch
from pibroch.collectives.team import team_of_environment

watch.STUCK_S = 0.5
with team_of_environment(leave_with) as team:
    team.enter(3)
    team.control.barrier()
    if team.ranks.rank == 0:
        print("waits", flush=True)
        dist.recv(torch.empty(1), 2)
    elif team.ranks.rank == 1:
        sys.stdin.readline()
        os._exit(9)
    else:
        time.sleep(300)
