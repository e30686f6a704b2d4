"""Messages over NCCL: what lies on the CPU passes through this rank's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.transport import Group, Transport, Wait


class NcclTransport(Transport):
    """A process group of all ranks, or of a group's members, who alone open it.

    torch names the latter by its members and by how many groups a process has made, which must be
    as many on each of them.
    """

    def __init__(self, ranks: Group) -> None:
        self._group = dist.new_group(
            None if ranks.are_all else list(ranks.members),
            timeout=timedelta(seconds=ranks.timeout_s),
            use_local_synchronization=not ranks.are_all,
        )
        # torch sorts them
        self._order = [ranks.members.index(member) for member in sorted(ranks.members)]
        self.device = torch.device("cuda", torch.cuda.current_device())

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Exchange through the device; blocks until all is done."""
        staged = [going[p].to(self.device) for p in self._order]
        received = [torch.empty_like(coming[p], device=self.device) for p in self._order]
        dist.all_to_all(received, staged, group=self._group)
        for p, tensor in zip(self._order, received, strict=True):
            coming[p].copy_(tensor)
        return lambda: None

    def reduce(self, tensor: Tensor) -> Wait:
        """Start a sum; NCCL's own wait would end the group when its time is over."""
        wait: Wait = dist.all_reduce(tensor, group=self._group, async_op=True).wait
        return wait

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
