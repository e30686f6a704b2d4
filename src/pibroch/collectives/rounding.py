"""Whether ranks round alike.

Each rank takes the step of its dense layers by itself, from the same gradients, and updates its own
copies of rows. Processors of several kinds round these otherwise: copies drift apart by their last
bits. Nothing else does: what a run decides by a figure, one rank decides.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import cache
from importlib.metadata import version

import torch

from pibroch.collectives.ranks import Channel
from pibroch.kernels.target import compile_target

logger = logging.getLogger(__name__)


def processor() -> str:
    """What kernels and torch take this process's processor for, which decides how they round."""
    return f"{compile_target()}, torch {torch.backends.cpu.get_cpu_capability()}"


def warn_of_other_rounding(channel: Channel) -> None:
    """Log, on the first rank and once in a process, which ranks round otherwise than others.

    Every rank calls it; blocks until all have.
    """
    ranks_by_kind = defaultdict(list)
    here = f"{processor()} (torch {torch.__version__}, numba {version('numba')})"
    for rank, kind in zip(channel.ranks.members, channel.gather(here), strict=True):
        ranks_by_kind[kind].append(rank)
    if len(ranks_by_kind) > 1 and channel.ranks.rank == 0:
        _warn("; ".join(f"ranks {ranks}: {kind}" for kind, ranks in ranks_by_kind.items()))


@cache  # a model is made data-parallel again whenever layers are thawed
def _warn(kinds: str) -> None:
    logger.warning(
        "ranks round differently: %s. What each of them computes for itself, dense layers in the"
        " optimizer's step and copies of rows, drifts apart by its last bits; for equal bits set"
        " NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and ATEN_CPU_CAPABILITY alike for all ranks, see"
        " docs/distributed.md, processors of several kinds",
        kinds,
    )
