"""torch.distributed.rpc in topic ``rpc_cases``."""

from __future__ import annotations

from torch.distributed import rpc

from benchmarks.cases import Case
from benchmarks.workers.rpc_cases import Driver, join


def build(case: Case) -> Driver:
    """Join, with its default settings."""
    return join(rpc.TensorPipeRpcBackendOptions(rpc_timeout=300))
