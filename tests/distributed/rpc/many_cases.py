"""What the test of many workers runs in each of them.

Apart, because a test module imports much that workers do not need.
"""

from pathlib import Path

import reference_cases as cases
import torch

from pibroch import rpc


def call_a_neighbour_and_the_owner(num_workers):
    """Each passes the owner's reference, and one of its own, to its neighbour, which uses both."""
    me = rpc.get_worker_info()
    neighbour = (me.id + 1) % num_workers
    count = rpc.remote("worker0", cases.Counter, (me.id,))
    own = rpc.RRef(torch.full((4,), float(me.id)))
    total = rpc.rpc_sync(neighbour, add_both, (count, own))
    return total, rpc.rpc_sync(neighbour, cases.identity, (torch.arange(3),)).tolist()


def add_both(count, values):
    return count.rpc_sync().add(1) + float(values.to_here().sum())


def memory_bytes():
    """Memory of this process; of pages that several share, its part."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return int(fields["Pss"].split()[0]) << 10
