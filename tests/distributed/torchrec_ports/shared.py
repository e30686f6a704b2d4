"""What the programs of both systems share: the same random ids, and where losses go.

Names neither system.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

# of all ranks together
STEPS = 20
SIZE = 12


def join():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def draw(step, rank, world, features, most=5):
    """This rank's part of a global batch: dense, lengths and ids (feature by feature), labels.

    ``features`` say of which.
    """
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(SIZE, 4, generator=generator)
    labels = torch.randint(0, 2, (SIZE,), generator=generator).float()
    own = slice(SIZE * rank // world, SIZE * (rank + 1) // world)
    lengths = []
    ids = []
    for rows in features.values():
        of_feature = torch.randint(1, most + 1, (SIZE,), generator=generator)
        drawn = torch.randint(0, rows, (SIZE, most), generator=generator)
        lengths.append(of_feature[own])
        ids += [
            bag[:length] for bag, length in zip(drawn[own], of_feature[own].tolist(), strict=True)
        ]
    return dense[own], torch.cat(lengths), torch.cat(ids), labels[own]


def folder():
    return Path(sys.argv[1])


def initial(name, model):
    """The weights with which both systems start.

    The first process that comes here alone writes them.
    """
    path = folder() / f"{name}.pt"
    if not path.exists():
        torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def save(name, losses):
    torch.save(
        losses, folder() / f"{name}-{sys.argv[2]}-{dist.get_world_size()}-{dist.get_rank()}.pt"
    )
