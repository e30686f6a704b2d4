"""torch.distributed.rpc in topic ``rpc``."""

from __future__ import annotations

import os

import torch
from torch.distributed import autograd, rpc

from benchmarks.cases import Case
from benchmarks.workers.rpc_subject import CALLEE, CALLER, RpcSubject


def build(case: Case) -> RpcSubject:
    """Join as the rank that the environment tells.

    Between lab hosts without the channel that copies from one process's memory to another's, for it would pass the link by.
    """
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=300)
    if "TP_SOCKET_IFNAME" in os.environ:
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=300, _transports=["uv"], _channels=["mpt_uv", "basic"])
    rpc.init_rpc((CALLEE, CALLER)[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return RpcSubject(rpc, autograd, {"torch": torch.__version__})
