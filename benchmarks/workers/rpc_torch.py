"""torch.distributed.rpc in topic ``rpc``."""

from __future__ import annotations

import os

import torch
from torch.distributed import autograd, rpc

from benchmarks.cases import Case
from benchmarks.workers.rpc_subject import CALLEE, CALLER, RpcSubject


def build(case: Case) -> RpcSubject:
    """Join as the rank that the environment tells; with default settings on one host.

    Between lab hosts without the channel that copies from one process's memory to another's, which
    would pass the link by, and without the one of several streams: there it takes twice as long for
    small tensors and is no faster for large ones.
    """
    if "TP_SOCKET_IFNAME" in os.environ:
        return join(
            rpc.TensorPipeRpcBackendOptions(
                rpc_timeout=300, _transports=["uv"], _channels=["basic"]
            )
        )
    return join(rpc.TensorPipeRpcBackendOptions(rpc_timeout=300))


def build_basic(case: Case) -> RpcSubject:
    """Build torch's RPC with a private setting: all goes through the transport.

    It is quicker for small tensors and slower for large ones.
    """
    return join(rpc.TensorPipeRpcBackendOptions(rpc_timeout=300, _channels=["basic"]))


def join(options: rpc.TensorPipeRpcBackendOptions) -> RpcSubject:
    """Join with these options."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc((CALLEE, CALLER)[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return RpcSubject(rpc, autograd, {"torch": torch.__version__})
